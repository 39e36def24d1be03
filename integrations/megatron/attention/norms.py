"""Which norms of q and k the exchange's own pass can do: RMSNorms over a head's features, with nobody watching them.

Megatron's DDP may watch them: with --overlap-param-gather a forward pre-hook of each module waits for its gathered weights. The
pass calls these hooks before it takes the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.transformer.identity_op import IdentityOp

from overlap_train import QkNorm

from ..norm import RMSNorm

HOOKS = ("_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GATHERING = "DistributedDataParallel._make_forward_pre_hook.<locals>."  # functions that are defined there

NewNorm = Callable[[], QkNorm]


def norm_within(q_norm: Any, k_norm: Any, weight: torch.Tensor) -> tuple[NewNorm | None, bool]:
    """(what makes the norm that can be part of the exchange's pass, whether there are norms that must be called after it).

    It is called behind the forward pre-hooks of the linear, in which Megatron's DDP waits for the weights before the norms'.

    The weights are the modules' own parameters, so that gradients land where the modules' calls would put them. Both norms are
    within, or none. weight: of the linear, whose dtype and device q and k have.
    """
    if all(norm is None or isinstance(norm, IdentityOp) for norm in (q_norm, k_norm)):
        return None, False
    how = _how(q_norm, weight)
    if how is None or how != _how(k_norm, weight):
        return None, True
    return partial(_gathered, q_norm, k_norm, *how), False


def _gathered(q_norm: Any, k_norm: Any, *how: Any) -> QkNorm:
    """The QkNorm with the weights of both norms, after the forward pre-hooks of their modules have run. With
    --overlap-param-gather these hooks wait for the gathered weights. how: see _how."""
    for norm in (q_norm, k_norm):
        for hook in norm._forward_pre_hooks.values():
            hook(norm, ())
    return QkNorm(q_norm.weight, k_norm.weight, *how)


def _how(norm: Any, weight: torch.Tensor) -> tuple[float, bool] | None:
    """(eps, zero_centered) of an RMSNorm in the dtype of `weight`; None of any other norm.

    A norm with other hooks than those of Megatron's DDP is called itself.
    """
    flag = _zero_centered(norm)
    if flag is None or norm.weight is None or not norm.eps or _is_watched(norm):
        return None
    if norm.weight.dim() != 1 or (norm.weight.dtype, norm.weight.device) != (weight.dtype, weight.device):
        return None
    return norm.eps, flag


def _is_watched(norm: Any) -> bool:
    """Whether somebody else than Megatron's DDP wants to know of its calls."""
    gathering = all(
        getattr(hook, "__qualname__", "").startswith(_GATHERING) for hook in norm._forward_pre_hooks.values()
    )
    return not gathering or any(getattr(norm, hooks) for hooks in HOOKS)


def _zero_centered(norm: Any) -> bool | None:
    """Whether an RMSNorm multiplies by 1 + weight instead of by weight; None for other modules. It knows torch's class, ours and
    TransformerEngine's, and no subclasses of them."""
    if type(norm) is torch.nn.RMSNorm:
        return False
    if type(norm) is RMSNorm:
        return norm.zero_centered
    if megatron_te.HAVE_TE and type(norm) is megatron_te.te.pytorch.RMSNorm:
        return norm.zero_centered_gamma
    return None
