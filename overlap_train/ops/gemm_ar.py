"""GEMM + AllReduce: y [M, N], on every rank the sum over ranks of a_mk [M, K/W] @ b_kn [K/W, N], + bias [N].

Two shots: a GEMM + RS (gemm_rs.py), then each rank sends the sums of its rows to all. They are two operators, one after the
other, so that no slot is wanted before it is free (group/workspace.py). What the caller multiplies in between hides the second.
In a forward pass nothing is in between. There the rows go in two halves where the estimate says that it pays, in one operator:
sums of the first travel under the product of the second. Few rows take one shot: one kernel sends a rank's partial sums to all,
as flagged words, and adds those of all in rank order. Either way the ranks have the same bits, on every run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import collective as collectives
from . import low_latency
from .planned import PlannedOp


def all_reduced(
    op: PlannedOp, a_mk: torch.Tensor, b_kn: torch.Tensor, meanwhile: Callable[[], None] = lambda: None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """y [M, N], of a row linear's forward or a column linear's backward; calls `meanwhile`, which multiplies, where that hides
    most."""
    domain, plan, rows = op.domain, op.plan, a_mk.shape[0]
    bias = bias if bias is None else bias.contiguous()  # kernels read it so
    in_backward = plan.spec.sends_input
    scope, tag = (op.backward[True, False], op.tags.dgrad) if in_backward else (op.forward, op.tags.fprop)
    if plan.fprop.method == "collective":
        with scope:
            domain.collective_calls.enter(tag)
            y = torch.mm(a_mk, b_kn)
            work = collectives.all_reduce(y, domain.group)
            meanwhile()
            if work is not None:
                work.wait()
        return y if bias is None else y.add_(bias)
    if plan.one_shot:
        with scope:
            partial = torch.mm(a_mk, b_kn)
            meanwhile()
            return low_latency.all_reduce(domain, tag, partial, plan.fprop.sm_margin, bias)
    if plan.halves and not in_backward:
        return _in_halves(op, a_mk, b_kn, bias)
    missing = -rows % domain.world_size
    with scope:
        a_mk = torch.nn.functional.pad(a_mk, (0, 0, 0, missing)) if missing else a_mk
        y_shard_m = plan.fprop.start(domain, tag, a_mk, b_kn, bias).finish()
    assert plan.gather is not None
    with op.gather:
        gather = plan.gather.start(domain, op.tags.wgrad, y_shard_m)
        with domain.span.products_beside(plan.gather):
            meanwhile()
        y = gather.gathered_copy()
    return y.resize_(rows, y.shape[1]) if missing else y


def _in_halves(op: PlannedOp, a_mk: torch.Tensor, b_kn: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y, in one operator of four calls. Its last takes the slot of its first: peers have read that when they send their third."""
    domain, plan, tags = op.domain, op.plan, op.tags
    assert plan.gather is not None
    y = a_mk.new_empty(a_mk.shape[0], b_kn.shape[1])
    (a_first, a_second), (y_first, y_second) = a_mk.chunk(2), y.chunk(2)
    with op.forward:
        sums_first = plan.fprop.start(domain, tags.fprop, a_first, b_kn, bias).finish()
        domain.workspace.receive_first()
        gather = plan.gather.start(domain, tags.wgrad, sums_first)
        scatter = plan.fprop.start(domain, tags.fprop, a_second, b_kn, bias)
        y_first.copy_(gather.gathered_view())
        sums_second = scatter.finish()
        domain.workspace.receive_first()
        y_second.copy_(plan.gather.start(domain, tags.wgrad, sums_second).gathered_view())
    return y
