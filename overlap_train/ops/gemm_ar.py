"""GEMM + AllReduce: y [M, N], on every rank the sum over ranks of a_mk [M, K/W] @ b_kn [K/W, N], + bias [N].

Two shots: a GEMM + RS (gemm_rs.py), then each rank sends the sums of its rows to all. They are two operators, one after the
other, so that no slot is wanted before it is free (group/workspace.py). What the caller multiplies in between hides the second.
In a forward pass nothing is in between. There `fused` sends each chunk of sums on as soon as it is stored, under the product of
the next one. Of few rows one kernel does all behind the product (low_latency.py). Either way the ranks have the same bits, on
every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..group.domain import OverlapDomain
from ..group.signals import Tag
from . import collective as collectives
from . import launch, low_latency
from .planned import PlannedOp

if TYPE_CHECKING:
    from .plan import EnginePlan


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
    if plan.shots:
        with scope:
            partial = torch.mm(a_mk, b_kn)
            meanwhile()
            return low_latency.all_reduce(domain, tag, partial, plan.shots, plan.fprop.sm_margin, bias)
    missing = -rows % domain.world_size
    a_mk = torch.nn.functional.pad(a_mk, (0, 0, 0, missing)) if missing else a_mk
    if plan.fprop.shares:
        with scope:
            y = sums_sent_on(domain, plan.fprop, (op.tags.fprop, op.tags.wgrad), a_mk, b_kn, bias)
            return y.resize_(rows, b_kn.shape[1])
    with scope:
        y_shard_m = plan.fprop.start(domain, tag, a_mk, b_kn, bias).finish()
    assert plan.gather is not None
    with op.gather:
        gather = plan.gather.start(domain, op.tags.wgrad, y_shard_m)
        with domain.span.products_beside(plan.gather):
            meanwhile()
        y = gather.gathered_copy()
    return y.resize_(rows, y.shape[1]) if missing else y


def sums_sent_on(
    domain: OverlapDomain, engine: EnginePlan, tags: tuple[Tag, Tag], a_mk: torch.Tensor, b_kn: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """y, by a scatter and a gather in one operator. When all sums are here, peers have read their blocks: the scatter's slot
    is free."""
    y = a_mk.new_empty(a_mk.shape[0], b_kn.shape[1])
    blocks, staging = y.view(domain.world_size, -1, y.shape[1]), torch.empty_like(y)
    own = blocks[domain.rank]
    scatter = domain.workspace.open(own.shape, y.dtype, tags[0], engine.chunks)
    domain.workspace.receive_first()
    gather = domain.workspace.open(own.shape, y.dtype, tags[1], engine.chunks)
    launch.multiply_and_push(domain, scatter, engine, a_mk, b_kn, staging.view_as(blocks), own, bias, gather)
    gather.take(blocks)
    return y
