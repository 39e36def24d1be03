"""The public operators and their autograd functions.

Forward and backward share two engines, crossed: the dgrad of one operator is the forward engine of the other.

    all_gather_linear        forward  AG(x) + GEMM        dgrad  GEMM + RS        wgrad  AG(x) under the dgrad GEMM, its GEMM
                                                                                         under the RS tail (chunked,
                                                                                         collective, fused deferred)
    linear_reduce_scatter    forward  GEMM + RS           dgrad  AG(dy) + GEMM    wgrad  with the dy just gathered

W ranks; M global rows (the product of all leading dimensions, the first of which is sharded); K input and N output features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .arguments import all_gather_problem, reduce_scatter_problem
from .config import OverlapConfig
from .operators.all_gather_gemm import start_all_gather, start_all_gather_whole
from .operators.gemm_reduce_scatter import start_gemm_reduce_scatter
from .plan import Plan, plan_of
from .profiling import profiled
from .weight_gradient import weight_gradient


def all_gather_linear(
    x_shard_m: torch.Tensor,
    w_shard_n: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    config: OverlapConfig | None = None,
    name: str = "all_gather_linear",
) -> torch.Tensor:
    """Column-parallel linear on a sequence-parallel input.

        x_shard_m  [M/W, K]   as [s/W, ..., K], first dimension sharded over the group
        w_shard_n  [N/W, K]   weight sharded over its output features
        bias       [N/W]
        y_shard_n  [M, N/W] = all_gather(x_shard_m) @ w_shard_n.T + bias, as [s, ..., N/W]
        dx_shard_m [M/W, K] = reduce_scatter(dy_shard_n @ w_shard_n)
        dw_shard_n [N/W, K] = dy_shard_n.T @ all_gather(x_shard_m)

    Args:
        group: the overlap domain; all its ranks make the same calls in the same order.
        config: method, policies and limits; None: the settings of the group's first call, else the defaults.
        name: what errors and profiles call this operator.

    Returns:
        y_shard_n in the dtype of x_shard_m (fp32, fp16 or bf16); products are accumulated in fp32. Where
        `w_shard_n.main_grad` exists, backward adds dw into it (config.main_grad).

    Raises:
        ValueError: shapes, dtypes, devices or group do not fit; on every rank of the group.
        OverlapTimeoutError: a peer did not arrive within config.timeout_s.
        RuntimeError: a CUDA graph is captured outside `graphed` or before the same call ran eagerly, symmetric memory is gone
            (`shutdown`), or a kernel as compiled here lacks a wait or a signal.

    Source: Triton-distributed (arXiv 2504.19442) section 3.2; TileLink and Flux describe the same decomposition.
    """
    plan = plan_of(all_gather_problem, x_shard_m, w_shard_n, bias, group, config, name)
    keep = plan.keeps and w_shard_n.requires_grad and torch.is_grad_enabled()
    y = _AllGatherLinear.apply(_rows(x_shard_m), w_shard_n, plan, keep)
    if x_shard_m.dim() > 2:
        y = y.view(x_shard_m.shape[0] * plan.domain.world_size, *x_shard_m.shape[1:-1], -1)
    return y if bias is None else y + bias


def linear_reduce_scatter(
    x_shard_k: torch.Tensor,
    w_shard_k: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    config: OverlapConfig | None = None,
    name: str = "linear_reduce_scatter",
) -> torch.Tensor:
    """Row-parallel linear with a sequence-parallel output.

        x_shard_k  [M, K/W]   as [s, ..., K/W], last dimension sharded over the group
        w_shard_k  [N, K/W]   weight sharded over its input features
        bias       [N]        the same on every rank, added after the reduction
        y_shard_m  [M/W, N] = reduce_scatter(x_shard_k @ w_shard_k.T) + bias, as [s/W, ..., N]
        dx_shard_k [M, K/W] = all_gather(dy_shard_m) @ w_shard_k
        dw_shard_k [N, K/W] = all_gather(dy_shard_m).T @ x_shard_k

    The gradient of bias is that of this rank's rows; sum it over the group (Megatron does so for parameters that are marked
    `sequence_parallel`).

    Arguments, dtypes, errors: see all_gather_linear. The first dimension of x_shard_k must be divisible by W. With the methods
    fused, direct and chunked the reduction is in fp32 and in a fixed order, so that every run gives the same bits; collective
    reduces as NCCL or gloo does.

    Source: Triton-distributed (arXiv 2504.19442) section 3.3.
    """
    plan = plan_of(reduce_scatter_problem, x_shard_k, w_shard_k, bias, group, config, name)
    y = _LinearReduceScatter.apply(_rows(x_shard_k), w_shard_k, plan)
    if x_shard_k.dim() > 2:
        y = y.view(x_shard_k.shape[0] // plan.domain.world_size, *x_shard_k.shape[1:-1], -1)
    return y if bias is None else y + bias


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] as [M, K]."""
    return x if x.dim() == 2 else x.flatten(0, -2)


class _AllGatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_shard_m: torch.Tensor, w_shard_n: torch.Tensor, plan: Plan, keep: bool) -> torch.Tensor:
        with plan.domain.operator(plan.fprop, 1, plan.fprop_in_step), profiled(plan.fprop_range):
            gather = start_all_gather(plan.domain, x_shard_m, plan.gather.method, plan.fprop, plan.gather.way)
            y_shard_n = gather.matmul(w_shard_n.t())
            saved = gather.kept() if keep else x_shard_m
        # weight: itself, for its main_grad; hooks on saved tensors (checkpointing) give back another object.
        ctx.plan, ctx.kept, ctx.weight = plan, keep, w_shard_n
        ctx.save_for_backward(saved if ctx.needs_input_grad[1] else None, w_shard_n)
        return y_shard_n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_shard_n: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        saved, w_shard_n = ctx.saved_tensors
        plan: Plan = ctx.plan
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        dx_shard_m = dw_shard_n = scatter = gather = None
        gathers = wants_dw and not ctx.kept
        in_step = plan.dgrad_in_step and gathers and wants_dx
        with plan.domain.operator(plan.dgrad, gathers + wants_dx, in_step), profiled(plan.dgrad_range):
            if gathers:
                gather = start_all_gather_whole(plan.domain, saved, plan.gather.method, plan.wgrad)
            if wants_dx:
                how = plan.scatter.method, plan.dgrad, plan.scatter.way
                scatter = start_gemm_reduce_scatter(plan.domain, dy_shard_n, w_shard_n, *how)
            if wants_dw:
                x = saved if gather is None else gather.full()
                with profiled(plan.wgrad_range):
                    dw_shard_n = weight_gradient(dy_shard_n, x, ctx.weight, plan.config.main_grad)
            if scatter is not None:
                dx_shard_m = scatter.finish()
        return dx_shard_m, dw_shard_n, None, None


class _LinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_shard_k: torch.Tensor, w_shard_k: torch.Tensor, plan: Plan) -> torch.Tensor:
        with plan.domain.operator(plan.fprop, 1, plan.fprop_in_step), profiled(plan.fprop_range):
            how = plan.scatter.method, plan.fprop, plan.scatter.way
            scatter = start_gemm_reduce_scatter(plan.domain, x_shard_k, w_shard_k.t(), *how)
            y_shard_m = scatter.finish()
        ctx.plan, ctx.weight = plan, w_shard_k  # as above
        ctx.save_for_backward(x_shard_k if ctx.needs_input_grad[1] else None, w_shard_k)
        return y_shard_m

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_shard_m: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x_shard_k, w_shard_k = ctx.saved_tensors
        plan: Plan = ctx.plan
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        dx_shard_k = dw_shard_k = None
        with plan.domain.operator(plan.dgrad, 1, plan.dgrad_in_step), profiled(plan.dgrad_range):
            gather = start_all_gather(plan.domain, dy_shard_m, plan.gather.method, plan.dgrad, plan.gather.way)
            if wants_dx:
                dx_shard_k = gather.matmul(w_shard_k)
            if wants_dw:
                with profiled(plan.wgrad_range):
                    dw_shard_k = weight_gradient(gather.full(), x_shard_k, ctx.weight, plan.config.main_grad)
        return dx_shard_k, dw_shard_k, None
