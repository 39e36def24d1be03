"""The passes of the column and the row linear of tensor parallelism, each one operator of its group.

    column    forward  AG(x) + GEMM    backward  GEMM + RS for dx, beside AG(x) for dw, whose GEMM runs under the end of the RS
    row       forward  GEMM + RS       backward  AG(dy) + GEMM for dx; dw with the dy just gathered

linear.py gives them to autograd. Under Ulysses, parts of a long sequence call them one by one (ulysses/tensor_parallel.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..planning.plan import barrier_first
from ..runtime.profiling import profiled
from .all_gather_gemm import start_gather
from .gemm_reduce_scatter import start_scatter
from .plan_book import PlannedLinear
from .weight_gradient import WeightGradient


def column_forward(
    linear: PlannedLinear, x_shard_m: torch.Tensor, w_shard_n: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y_shard_n [M, N/W] = all_gather(x_shard_m) @ w_shard_n.T, x for backward: [M, K] if it is kept, else the shard)."""
    domain, plan, tags = linear.domain, linear.plan, linear.tags
    with domain.operator(tags.fprop, plan.fprop.slots, plan.fprop.variant.barrier_first), profiled(tags.ranges[0]):
        gather = start_gather(domain, plan.fprop, tags.fprop, x_shard_m)
        y_shard_n = gather.matmul(w_shard_n.t())
        return y_shard_n, gather.gathered_copy() if linear.keeps else x_shard_m


def column_backward(
    linear: PlannedLinear, dy_shard_n: torch.Tensor, x: torch.Tensor | None, w_shard_n: torch.Tensor,
    dw: WeightGradient | None, wants_dx: bool,
) -> torch.Tensor | None:  # fmt: skip
    """dx_shard_m [M/W, K] = reduce_scatter(dy_shard_n @ w_shard_n), or None.

    x: as column_forward returned it. dw: gets dy_shard_n.T @ all_gather(x); None: it is not wanted, and x neither.
    """
    domain, plan, tags = linear.domain, linear.plan, linear.tags
    dx_shard_m = scatter = gather = None
    wgrad = None if dw is None else plan.wgrad
    slots = (0 if wgrad is None else wgrad.slots) + wants_dx * plan.dgrad.slots
    begins_with_barrier = wants_dx and barrier_first(plan, wgrad is not None)
    with domain.operator(tags.dgrad, slots, begins_with_barrier), profiled(tags.ranges[1]):
        if wgrad is not None:
            assert x is not None
            gather = start_gather(domain, wgrad, tags.wgrad, x)
        if wants_dx:
            scatter = start_scatter(domain, plan.dgrad, tags.dgrad, dy_shard_n, w_shard_n)
        if dw is not None:
            gathered = x if gather is None else gather.gathered_view()
            assert gathered is not None
            with profiled(tags.ranges[2]):
                dw.add(dy_shard_n, gathered)
        if scatter is not None:
            dx_shard_m = scatter.finish()
    return dx_shard_m


def row_forward(linear: PlannedLinear, x_shard_k: torch.Tensor, w_shard_k: torch.Tensor) -> torch.Tensor:
    """y_shard_m [M/W, N] = reduce_scatter(x_shard_k @ w_shard_k.T)."""
    domain, plan, tags = linear.domain, linear.plan, linear.tags
    with domain.operator(tags.fprop, plan.fprop.slots, plan.fprop.variant.barrier_first), profiled(tags.ranges[0]):
        return start_scatter(domain, plan.fprop, tags.fprop, x_shard_k, w_shard_k.t()).finish()


def row_backward(
    linear: PlannedLinear, dy_shard_m: torch.Tensor, x: Callable[[], torch.Tensor], w_shard_k: torch.Tensor,
    dw: WeightGradient | None, wants_dx: bool,
) -> torch.Tensor | None:  # fmt: skip
    """dx_shard_k [M, K/W] = all_gather(dy_shard_m) @ w_shard_k, or None.

    x: gives x_shard_k, or its blocks of columns, when dx is under way. dw: gets all_gather(dy_shard_m).T @ x_shard_k; None: it is
    not wanted.
    """
    domain, plan, tags, dx_shard_k = linear.domain, linear.plan, linear.tags, None
    with domain.operator(tags.dgrad, plan.dgrad.slots, barrier_first(plan, gathers=True)), profiled(tags.ranges[1]):
        gather = start_gather(domain, plan.dgrad, tags.dgrad, dy_shard_m)
        if wants_dx:
            dx_shard_k = gather.matmul(w_shard_k)
        if dw is not None:
            with profiled(tags.ranges[2]):
                dw.add(gather.gathered_view(), x())
    return dx_shard_k
