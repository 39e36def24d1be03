"""The public operators of tensor parallelism without sequence parallelism: every rank has all rows, and sums are all-reduced.

    linear_dgrad_all_reduce (column)    forward  GEMM         backward  GEMM + AR for dx; dw's GEMM under the end of the AR
    linear_all_reduce (row)             forward  GEMM + AR    backward  GEMM for dx; GEMM for dw

W ranks; M rows (the product of all leading dimensions, any number of them); K input and N output features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .config import OverlapConfig
from .group.domain import profiled
from .linear import applied, as_rows, as_sequence, call, gradients, once_differentiable
from .ops.gemm_ar import all_reduced
from .ops.plan_cache import OnPlan
from .ops.planned import PlannedOp
from .ops.spec import LINEAR_ALL_REDUCE, LINEAR_DGRAD_ALL_REDUCE
from .ops.wgrad import WeightGradient


def linear_dgrad_all_reduce(
    x: torch.Tensor,
    w_shard_n: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    config: OverlapConfig | None = None,
    name: str = "linear_dgrad_all_reduce",
    on_plan: OnPlan | None = None,
) -> torch.Tensor:
    """Column-parallel linear on an input that every rank has.

        x          [M, K]     as [s, ..., K], the same on every rank
        w_shard_n  [N/W, K]   weight sharded over its output features
        bias       [N/W]
        y_shard_n  [M, N/W] = x @ w_shard_n.T + bias, as [s, ..., N/W]
        dx         [M, K]   = all_reduce(dy_shard_n @ w_shard_n), the same bits on every rank
        dw_shard_n [N/W, K] = dy_shard_n.T @ x

    Forward communicates at a first call only, where ranks agree. Arguments, dtypes, errors: see all_gather_linear. config's
    tune_steps and gathered_input do not count here: nothing is timed, and nothing gathered.

    Source: the GEMM + AllReduce of the Ditron paper, section E.3, is the same sum of tiles.
    """
    return call(
        linear_dgrad_all_reduce, LINEAR_DGRAD_ALL_REDUCE, _apply_dgrad_all_reduce, x, w_shard_n, bias,
        group, config, name, on_plan,
    )  # fmt: skip


def linear_all_reduce(
    x_shard_k: torch.Tensor,
    w_shard_k: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    config: OverlapConfig | None = None,
    name: str = "linear_all_reduce",
    on_plan: OnPlan | None = None,
) -> torch.Tensor:
    """Row-parallel linear with an output that every rank has.

        x_shard_k  [M, K/W]   as [s, ..., K/W], last dimension sharded over the group
        w_shard_k  [N, K/W]   weight sharded over its input features
        bias       [N]        the same on every rank
        y          [M, N]   = all_reduce(x_shard_k @ w_shard_k.T) + bias, the same bits on every rank
        dx_shard_k [M, K/W] = dy @ w_shard_k
        dw_shard_k [N, K/W] = dy.T @ x_shard_k

    dy is taken to be the same on every rank, so backward does not communicate. Arguments, dtypes, errors: see all_gather_linear;
    tune_steps and gathered_input as in linear_dgrad_all_reduce. All methods but collective add in fp32 and in a fixed order.

    Source: as linear_dgrad_all_reduce.
    """
    return call(
        linear_all_reduce, LINEAR_ALL_REDUCE, _apply_all_reduce, x_shard_k, w_shard_k, bias,
        group, config, name, on_plan,
    )  # fmt: skip


class _LinearDgradAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w_shard_n: torch.Tensor, bias: torch.Tensor | None, linear: PlannedOp
    ) -> torch.Tensor | None:
        ctx.linear, ctx.weight, ctx.x_shape = linear, w_shard_n, x.shape  # weight: as in linear.py
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w_shard_n)
        with profiled(linear.tags.ranges.fprop):
            y_shard_n = torch.nn.functional.linear(as_rows(x), w_shard_n, bias)
        return as_sequence(y_shard_n, ctx.x_shape[0], ctx.x_shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_shard_n: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        linear, (x, w_shard_n) = ctx.linear, ctx.saved_tensors
        dw, dy_rows, dx = WeightGradient.of_backward(ctx), as_rows(dy_shard_n), None

        def multiply() -> None:
            if dw is not None:
                with profiled(linear.tags.ranges.wgrad):
                    dw.add(dy_rows, as_rows(x))

        if ctx.needs_input_grad[0]:
            dx = all_reduced(linear, dy_rows, w_shard_n, multiply)
        else:
            multiply()
        return gradients(ctx, dx, dw, dy_rows)


class _LinearAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_shard_k: torch.Tensor, w_shard_k: torch.Tensor, bias: torch.Tensor | None, linear: PlannedOp
    ) -> torch.Tensor | None:
        ctx.linear, ctx.weight, ctx.x_shape = linear, w_shard_k, x_shard_k.shape
        ctx.save_for_backward(x_shard_k if ctx.needs_input_grad[1] else None, w_shard_k)
        y = all_reduced(linear, as_rows(x_shard_k), w_shard_k.t(), bias=bias)
        return as_sequence(y, ctx.x_shape[0], ctx.x_shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        linear, (x_shard_k, w_shard_k) = ctx.linear, ctx.saved_tensors
        dw, dy_rows = WeightGradient.of_backward(ctx), as_rows(dy)
        with profiled(linear.tags.ranges.dgrad):
            dx_shard_k = torch.mm(dy_rows, w_shard_k) if ctx.needs_input_grad[0] else None
        if dw is not None:
            with profiled(linear.tags.ranges.wgrad):
                dw.add(dy_rows, as_rows(x_shard_k))
        return gradients(ctx, dx_shard_k, dw, dy_rows)


_apply_dgrad_all_reduce, _apply_all_reduce = applied(_LinearDgradAllReduce), applied(_LinearAllReduce)
