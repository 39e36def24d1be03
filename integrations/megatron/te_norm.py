"""TransformerEngine's norm before a column linear: its kernels, called directly, and one autograd function for both.

    h [s/W, b, K] = norm(x) * gamma + beta
    y [s, b, N/W] = all_gather(h) @ w_shard_n.T
    dx [s/W, b, K], dgamma [K], dbeta [K] = the norm's gradients at dh = reduce_scatter(dy @ w_shard_n)

TransformerEngine's own norm modules reach the same kernels through its op fuser, which takes a third of a millisecond of host
time in backward alone. RMSNorm has no beta and no mean.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_te_version, is_te_min_version

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron.conditions import attribute
from overlap_train.linear import (
    applied,
    as_a_whole,
    as_rows,
    as_sequence,
    column_backward,
    column_forward,
    once_differentiable,
)
from overlap_train.ops.plan_cache import OnPlan, op_of
from overlap_train.ops.planned import PlannedOp
from overlap_train.ops.spec import ALL_GATHER_LINEAR
from overlap_train.ops.wgrad import WeightGradient

_KERNELS, _CONSTANTS = "transformer_engine_torch", "transformer_engine.pytorch.constants"
OLDEST = "2.0"  # TransformerEngine whose norm kernels are called as here


@cache
def too_old() -> str | None:
    """Why the norms of the TransformerEngine here cannot be called; None: they can."""
    if is_te_min_version(OLDEST):
        return None
    return f"TransformerEngine {get_te_version()}: its norms and quantizers are called as in {OLDEST} and later"


@dataclass(frozen=True)
class NormKernels:
    """How one linear calls TransformerEngine's kernels. forward_margin, backward_margin: SMs that they leave to others."""

    eps: float
    zero_centered: bool
    forward_margin: int
    backward_margin: int

    def forward(
        self, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """(h [M, K], means or None, 1 / deviations [M]) of x [M, K]."""
        kernels, dtypes = (sys.modules[name] for name in (_KERNELS, _CONSTANTS))
        how = (self.eps, None, None, dtypes.TE_DType[x.dtype], self.forward_margin, self.zero_centered)
        if beta is None:
            return kernels.rmsnorm_fwd(x, gamma, *how)
        return kernels.layernorm_fwd(x, gamma, beta, *how)

    def backward(
        self, dh: torch.Tensor, x: torch.Tensor, mean: torch.Tensor | None, scale: torch.Tensor, gamma: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """(dx [M, K], dgamma [K], dbeta [K] or None)."""
        kernels, how = sys.modules[_KERNELS], (self.backward_margin, self.zero_centered)
        if mean is None:
            return (*kernels.rmsnorm_bwd(dh, x, scale, gamma, *how), None)
        return tuple(kernels.layernorm_bwd(dh, x, mean, scale, gamma, *how))


def norm_kernels(linear: Any) -> NormKernels | None:
    """Of a linear with a norm before it; None of others."""
    if not hasattr(linear, "layer_norm_weight"):
        return None
    margins = (attribute(linear, f"{pass_}_ln_sm_margin", 0) for pass_ in ("fwd", "bwd"))
    return NormKernels(linear.eps, linear.zero_centered_gamma, *margins)


@as_a_whole
def normed(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """x by the norm of a linear; x itself where it has none."""
    kernels = linear.overlap.norm
    if kernels is None:
        return x
    h: torch.Tensor = _apply_norm(x, linear.layer_norm_weight, linear.layer_norm_bias, kernels)
    return h


@as_a_whole
def norm_all_gather_linear(
    linear: Any, x_shard_m: torch.Tensor, w_shard_n: torch.Tensor, bias: torch.Tensor | None, wants_h: bool = False, *,
    group: dist.ProcessGroup, config: OverlapConfig, name: str, on_plan: OnPlan,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(y, h or None) of x by the norm of `linear` and all_gather_linear, whose arguments the others are. h: with wants_h."""
    gamma, beta = linear.layer_norm_weight, linear.layer_norm_bias
    if gamma.requires_grad and not x_shard_m.requires_grad and torch.is_grad_enabled():
        # the plan is that of a product whose operand, h, gets a gradient
        x_shard_m = x_shard_m.detach().requires_grad_()
    op = op_of(ALL_GATHER_LINEAR, x_shard_m, w_shard_n, bias, group, config, name, on_plan)
    y, *h = _apply_norm_all_gather(x_shard_m, w_shard_n, bias, gamma, beta, linear.overlap.norm, op, wants_h)
    return y, h[0] if h else None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, kernels: NormKernels
    ) -> torch.Tensor | None:
        rows = as_rows(x).contiguous()
        h, *statistics = kernels.forward(rows, gamma, beta)
        ctx.kernels, ctx.x_shape = kernels, x.shape
        ctx.save_for_backward(rows, *statistics, gamma)
        return as_sequence(h, x.shape[0], x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, *others = ctx.kernels.backward(as_rows(dh), *ctx.saved_tensors)
        return as_sequence(dx, ctx.x_shape[0], ctx.x_shape), *others, None


class _NormAllGatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_shard_m: torch.Tensor, w_shard_n: torch.Tensor, bias: torch.Tensor | None, gamma: torch.Tensor,
        beta: torch.Tensor | None, kernels: NormKernels, linear: PlannedOp, wants_h: bool,
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        rows, shape = as_rows(x_shard_m).contiguous(), x_shard_m.shape
        h, *statistics = kernels.forward(rows, gamma, beta)
        y_shard_n, operand = column_forward(linear, h, w_shard_n, bias)
        ctx.kernels, ctx.linear, ctx.weight, ctx.x_shape = kernels, linear, w_shard_n, shape  # weight: as in linear.py
        ctx.save_for_backward(rows, *statistics, gamma, w_shard_n, operand if ctx.needs_input_grad[1] else None)
        y = as_sequence(y_shard_n, shape[0] * linear.domain.world_size, shape)
        return (y, as_sequence(h, shape[0], shape)) if wants_h else (y,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_shard_n: torch.Tensor, dh: torch.Tensor | None = None) -> tuple[torch.Tensor | None, ...]:
        *saved, w_shard_n, operand = ctx.saved_tensors
        linear, (wants_dx, _, wants_dbias, *wants_norm) = ctx.linear, ctx.needs_input_grad[:5]
        dw = WeightGradient.of_backward(ctx)
        operand, dy_rows = operand if operand is None else as_rows(operand), as_rows(dy_shard_n)
        dh_shard_m = column_backward(linear, dy_rows, operand, w_shard_n, dw, wants_dx or any(wants_norm))
        dx = dgamma = dbeta = None
        if dh_shard_m is not None:
            dh_shard_m = dh_shard_m if dh is None else dh_shard_m + as_rows(dh)
            dx, dgamma, dbeta = ctx.kernels.backward(dh_shard_m, *saved)
        dx = as_sequence(dx, ctx.x_shape[0], ctx.x_shape)
        dbias = dy_rows.sum(0) if wants_dbias else None
        return dx, None if dw is None else dw.result(), dbias, dgamma, dbeta, None, None, None


_apply_norm, _apply_norm_all_gather = applied(_Norm), applied(_NormAllGatherLinear)
