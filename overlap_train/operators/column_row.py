"""The passes of the column and the row linear of tensor parallelism, each one operator of its group.

    column    forward  AG(x) + GEMM    backward  GEMM + RS for dx, beside AG(x) for dw, whose GEMM runs under the end of the RS
    row       forward  GEMM + RS       backward  AG(dy) + GEMM for dx; dw with the dy just gathered

linear.py gives them to autograd. Under Ulysses, parts of a long sequence call them one by one (ulysses/two_groups.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..runtime.profiling import profiled
from .planned import PlannedLinear
from .start import products_beside, start_gather, start_scatter
from .weight_gradient import WeightGradient


def column_forward(
    linear: PlannedLinear, x_shard_m: torch.Tensor, w_shard_n: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y_shard_n [M, N/W] = all_gather(x_shard_m) @ w_shard_n.T, x for backward: [M, K] if it is kept, else the shard)."""
    domain, plan, tags = linear.domain, linear.plan, linear.tags
    with linear.forward:
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
    with linear.backward(wants_dx, dw is not None):
        if wgrad is not None:
            assert x is not None
            gather = start_gather(domain, wgrad, tags.wgrad, x)
        if wants_dx:
            dgrad = plan.dgrad_alone if dw is None else plan.dgrad
            scatter = start_scatter(domain, dgrad, tags.dgrad, dy_shard_n, w_shard_n)
            if gather is not None:
                gather.keep_own(dgrad)
        if dw is not None:
            gathered = x if gather is None else gather.gathered_view()
            assert gathered is not None
            with profiled(tags.ranges[2]), products_beside(domain, None if scatter is None else plan.dgrad):
                dw.add(dy_shard_n, gathered)
        if scatter is not None:
            dx_shard_m = scatter.finish()
    return dx_shard_m


def row_forward(linear: PlannedLinear, x_shard_k: torch.Tensor, w_shard_k: torch.Tensor) -> torch.Tensor:
    """y_shard_m [M/W, N] = reduce_scatter(x_shard_k @ w_shard_k.T)."""
    with linear.forward:
        return start_scatter(linear.domain, linear.plan.fprop, linear.tags.fprop, x_shard_k, w_shard_k.t()).finish()


def row_backward(
    linear: PlannedLinear, dy_shard_m: torch.Tensor, x: Callable[[], torch.Tensor], w_shard_k: torch.Tensor,
    dw: WeightGradient | None, wants_dx: bool,
) -> torch.Tensor | None:  # fmt: skip
    """dx_shard_k [M, K/W] = all_gather(dy_shard_m) @ w_shard_k, or None.

    x: gives x_shard_k, or its blocks of columns, when dx is under way. dw: gets all_gather(dy_shard_m).T @ x_shard_k; None: it is
    not wanted.
    """
    domain, plan, tags, dx_shard_k = linear.domain, linear.plan, linear.tags, None
    with linear.backward(True, dw is not None):  # the peers want dy_shard_m, whatever this rank does
        gather = start_gather(domain, plan.dgrad, tags.dgrad, dy_shard_m)
        if wants_dx:
            dx_shard_k = gather.matmul(w_shard_k)
            if dw is not None:
                gather.keep_own(plan.dgrad)
        if dw is not None:
            with profiled(tags.ranges[2]):
                dw.add(gather.gathered_view(), x())
    return dx_shard_k
