"""Which norms of q and k the exchange's own pass can do: RMSNorms over a head's features, with nobody watching them."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.transformer.identity_op import IdentityOp

from overlap_train import QkNorm

from ..norm import RMSNorm

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def norm_within(q_norm: Any, k_norm: Any, weight: torch.Tensor) -> tuple[QkNorm | None, bool]:
    """(the norm that can be part of the exchange's pass, whether there are norms that must be called after it).

    The weights are the modules' own parameters, so that gradients land where the modules' calls would put them. Both norms are
    within, or none. weight: of the linear, whose dtype and device q and k have.
    """
    if all(norm is None or isinstance(norm, IdentityOp) for norm in (q_norm, k_norm)):
        return None, False
    how = _how(q_norm, weight)
    if how is None or how != _how(k_norm, weight):
        return None, True
    return QkNorm(q_norm.weight, k_norm.weight, *how), False


def _how(norm: Any, weight: torch.Tensor) -> tuple[float, bool] | None:
    """(eps, zero_centered) of an RMSNorm in the dtype of `weight`; None of any other norm.

    A norm with hooks is called itself: Megatron's DDP waits for gathered parameters in one (--overlap-param-gather).
    """
    flag = _zero_centered(norm)
    if flag is None or norm.weight is None or not norm.eps or any(getattr(norm, hooks) for hooks in HOOKS):
        return None
    if norm.weight.dim() != 1 or (norm.weight.dtype, norm.weight.device) != (weight.dtype, weight.device):
        return None
    return norm.eps, flag


def _zero_centered(norm: Any) -> bool | None:
    """Of the classes of which we know that they are RMSNorms, and subclasses are not among them; None of others."""
    if type(norm) is torch.nn.RMSNorm:
        return False
    if type(norm) is RMSNorm:
        return norm.zero_centered
    if megatron_te.HAVE_TE and type(norm) is megatron_te.te.pytorch.RMSNorm:
        return norm.zero_centered_gamma
    return None
