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
from overlap_train.integrations.megatron.norm import RMSNorm

HOOKS = ("_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GATHERING = "DistributedDataParallel._make_forward_pre_hook.<locals>."  # functions that are defined there

NewNorm = Callable[[], QkNorm]


def norm_within(q_norm: Any, k_norm: Any, weight: torch.Tensor) -> tuple[NewNorm | None, bool]:
    """Decide who normalises q and k: the exchange's own pass, both of them, or the modules after it.

    Returns:
        A function that makes the norms of the pass, or None; and whether the modules must be called after the exchange. The
        function is to be called after the linear's forward pre-hooks: in these Megatron's DDP waits for weights in their order.

    The norms of the pass have the modules' own parameters. So gradients land where the modules' calls would put them.

    Args:
        weight: of the linear; q and k have its dtype and device.
    """
    if all(norm is None or isinstance(norm, IdentityOp) for norm in (q_norm, k_norm)):
        return None, False
    how = _how(q_norm, weight)
    if how is None or how != _how(k_norm, weight):
        return None, True
    return partial(_gathered, q_norm, k_norm, *how), False


def _gathered(q_norm: Any, k_norm: Any, *how: Any) -> QkNorm:
    """Run the forward pre-hooks of both modules, and return the QkNorm with their weights. With --overlap-param-gather these
    hooks wait for the gathered weights. how: see _how."""
    for norm in (q_norm, k_norm):
        for hook in norm._forward_pre_hooks.values():
            hook(norm, ())
    return QkNorm(q_norm.weight, k_norm.weight, *how)


def _how(norm: Any, weight: torch.Tensor) -> tuple[float, bool] | None:
    """(eps, zero_centered) of an RMSNorm that the pass can do; None: the module must be called, because it is another norm, of
    another dtype or device than `weight`, or has hooks besides those of Megatron's DDP."""
    flag = _zero_centered(norm)
    if flag is None or norm.weight is None or not norm.eps or _is_watched(norm):
        return None
    if norm.weight.dim() != 1 or (norm.weight.dtype, norm.weight.device) != (weight.dtype, weight.device):
        return None
    return norm.eps, flag


def _is_watched(norm: Any) -> bool:
    """Whether a module has hooks besides those of Megatron's DDP, which a call would run."""
    gathering = all(
        getattr(hook, "__qualname__", "").startswith(_GATHERING) for hook in norm._forward_pre_hooks.values()
    )
    return not gathering or any(getattr(norm, hooks) for hooks in HOOKS)


def _zero_centered(norm: Any) -> bool | None:
    """Whether an RMSNorm multiplies by 1 + weight instead of by weight. None for other modules than torch's class, ours and
    TransformerEngine's, and for subclasses of these."""
    if type(norm) is torch.nn.RMSNorm:
        return False
    if type(norm) is RMSNorm:
        return norm.zero_centered
    if megatron_te.HAVE_TE and type(norm) is megatron_te.te.pytorch.RMSNorm:
        return norm.zero_centered_gamma
    return None
