"""GEMM + ReduceScatter: y_shard_m [M/W, N] = this rank's rows of the sum over ranks of a_mk [M, K/W] @ b_kn [K/W, N].

The GEMM computes the peers' rows first and its own last (planning/schedule.py has the order). A destination's rows leave as
soon as they are complete. The own rows then add the partials that have arrived, in fp32 and in a fixed order: the same bits on
every run. The last tiles of a persistent kernel do that, or a kernel of its own in `finish` (chunked, and fused with
`Variant.split_reduction`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from ..gpu.launch import Launch
from ..planning.plan import EnginePlan
from ..planning.schedule import Leg
from ..protocol.node_engine import NodeEngine
from ..protocol.node_slot import NodeCall
from ..protocol.node_streams import NodeStreamEngine
from ..protocol.slot import Call
from ..protocol.tags import Tag
from ..runtime.domain import OverlapDomain
from ..symmetric.inter_node import Transport
from . import collectives, low_latency, persistent
from .kernel_args import ScatterOperands, on_a_gpu
from .persistent import aligned, should_run_async


class Scatter(Protocol):
    """y_shard_m [M/W, N] on its way."""

    def start(self) -> None:
        """Start the GEMM and the sends."""
        ...

    def finish(self) -> torch.Tensor:
        """Wait for the peers' partials; y_shard_m, complete."""
        ...


def start_scatter(domain: OverlapDomain, plan: EnginePlan, tag: Tag, a_mk: torch.Tensor, b_kn: torch.Tensor) -> Scatter:
    """A started engine that multiplies and reduces."""
    engine = SCATTERS[plan.method] if plan.nodes == 1 else _across_nodes(domain, plan)
    scatter = engine(domain, plan, tag, a_mk, b_kn)
    scatter.start()
    return scatter


class CollectiveScatter:
    """One GEMM, then NCCL or gloo; a long one (`should_run_async`) runs beside what the caller does before `finish`."""

    def __init__(
        self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, a_mk: torch.Tensor, b_kn: torch.Tensor
    ) -> None:
        self._domain, self._tag, self._a, self._b = domain, tag, a_mk, b_kn

    def start(self) -> None:
        self._domain.before_collective(self._tag)
        self._partial = torch.mm(self._a, self._b)
        self._y = self._partial.new_empty(self._a.shape[0] // self._domain.world_size, self._b.shape[1])
        aside = should_run_async(self._partial)
        self._work = collectives.reduce_scatter(self._y, self._partial, self._domain.group, aside)

    def finish(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
        return self._y


class ChunkedScatter:
    """A library GEMM for each destination's rows, pushed as it ends; the reduction is a pass of its own."""

    def __init__(
        self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, a_mk: torch.Tensor, b_kn: torch.Tensor
    ) -> None:
        self._domain, self._plan, self._tag, self._a, self._b = domain, plan, tag, a_mk, b_kn

    def start(self) -> None:
        domain, world, (m, k) = self._domain, self._domain.world_size, self._a.shape
        self._partials = self._a.new_empty(world, m // world, self._b.shape[1])  # block d: rows of rank d
        self._call = domain.workspace.open(self._partials.shape[1:], self._a.dtype, self._tag)
        self._call.next_epoch()
        rows = self._a.view(world, m // world, k)  # strided or expanded, too; unflatten takes 2 us more
        for target, legs in self._plan.legs.by_target:
            torch.mm(rows[target], self._b, out=self._partials[target])
            domain.engine.push(self._partials, self._call.routes(legs))
        torch.mm(rows[domain.rank], self._b, out=self._partials[domain.rank])

    def finish(self) -> torch.Tensor:
        return reduce_partials(self._domain, self._call, self._partials[self._domain.rank])


class NodeScatter(ChunkedScatter):
    """The same across nodes, far nodes first: the blocks of a node go to its ranks' twins in this node, each of which adds them
    up and sends the sum. Sums and sends run beside the GEMMs of the next node."""

    _call: NodeCall

    def start(self) -> None:
        domain, world = self._domain, self._domain.world_size
        self._partials = self._a.new_empty(world, self._a.shape[0] // world, self._b.shape[1])
        call = domain.workspace.open(self._partials.shape[1:], self._a.dtype, self._tag, self._plan.chunks)
        call.next_epoch()
        rows = self._a.unflatten(0, (world, -1))
        assert isinstance(call, NodeCall) and isinstance(domain.engine, NodeEngine)
        self._call = call
        for block, legs in self._plan.legs.by_block:
            for leg in legs.network:
                part = call.chunk_rows(leg.chunk)
                torch.mm(rows[block, part], self._b, out=self._partials[block, part])
                domain.engine.later.run(partial(self._send_sum, domain.engine.network, leg))
            if legs.inside.all:
                torch.mm(rows[block], self._b, out=self._partials[block])
                domain.engine.push(self._partials, call.routes(legs.inside))
        own = domain.rank
        torch.mm(rows[own], self._b, out=self._partials[own])

    def _send_sum(self, network: Transport, leg: Leg) -> None:
        total = self._sum_for(leg.block, leg.chunk).to(self._a.dtype)
        network.put(total, self._call.place(leg), self._call.word)

    def _sum_for(self, twin: int, chunk: int) -> torch.Tensor:
        """The partials of this node for a chunk of the rows of `twin`, in fp32: the own one, then the others in rank order."""
        topology, rows = self._domain.topology, self._call.chunk_rows(chunk)
        total = self._partials[twin, rows].to(torch.float32, copy=True)
        for block in topology.ranks_of(twin // topology.local):
            if block != twin:
                self._call.wait_chunk(block, chunk)
                total += self._call.chunk_of(block, chunk)
        return total

    def finish(self) -> torch.Tensor:
        """Own node first, then the sums of the others in order of nodes."""
        topology, call = self._domain.topology, self._call
        y = self._partials.new_empty(self._partials.shape[1:])
        for chunk in range(call.chunks):
            total = self._sum_for(topology.rank, chunk)
            for node in range(topology.nodes):
                if node != topology.node:
                    call.wait_chunk(topology.twin(node), chunk)
                    total += call.chunk_of(topology.twin(node), chunk)
            y[call.chunk_rows(chunk)] = total
        return y


class FusedScatter:
    """One persistent kernel. A counter per destination and chunk releases its push by the copy engine."""

    def __init__(
        self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, a_mk: torch.Tensor, b_kn: torch.Tensor
    ) -> None:
        self._domain, self._plan, self._tag = domain, plan, tag
        self._a, self._b = persistent.operand(plan, a_mk), b_kn

    def start(self) -> None:
        self._y = self._a.new_empty(self._a.shape[0] // self._domain.world_size, self._b.shape[1])  # perhaps a partial
        self._call = self._domain.workspace.open(self._y.shape, self._a.dtype, self._tag, self._plan.chunks)
        self._launch()

    def _launch(self) -> None:
        m_shard, n = self._y.shape
        staging = self._a.new_empty(self._domain.world_size, m_shard, n)
        routes = self._call.routes(self._plan.legs, tiles=self._plan.tile.counted(m_shard // self._plan.chunks, n))
        self._call.next_epoch()
        self._domain.engine.launch(lambda: self._kernel(staging), staging, routes)

    def _kernel(self, staging: torch.Tensor | None) -> None:
        """Launch it; partials for the peers go to staging [W, M/W, N] or, with None, straight to the peers."""
        operands = ScatterOperands(self._a, self._b, staging, self._y)
        persistent.multiply_and_send(self._domain, self._call, self._plan, operands)

    def finish(self) -> torch.Tensor:
        if self._plan.variant.split_reduction:
            return reduce_partials(self._domain, self._call, self._y)
        return self._y


class DirectScatter(FusedScatter):
    """The epilogue stores tiles at the peers and sends the signals: nothing is staged or pushed, which takes no host time."""

    def _launch(self) -> None:
        self._kernel(None)


class LowLatencyScatter:
    """One library GEMM; then, after what the caller does meanwhile, one kernel that sends and adds."""

    def __init__(
        self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, a_mk: torch.Tensor, b_kn: torch.Tensor
    ) -> None:
        self._domain, self._tag, self._a, self._b = domain, tag, a_mk, b_kn

    def start(self) -> None:
        self._partial = torch.mm(self._a, self._b)

    def finish(self) -> torch.Tensor:
        return low_latency.scatter(self._domain, self._tag, self._partial)


def reduce_partials(domain: OverlapDomain, call: Call, own: torch.Tensor) -> torch.Tensor:
    """own [M/W, N] + what the peers send [W, M/W, N] in rank order, the own block left out, summed in fp32 -> own's dtype."""
    call.wait_for_all()
    if on_a_gpu(domain):
        y = torch.empty_like(own)
        values = (own.data_ptr(), y.data_ptr())
        call.launches.run(("reduce", aligned(*values)), values, partial(_reduce_launch, domain, call, own, y))
        return y
    total = own.to(torch.float32, copy=True)  # not a view, which autograd would refuse to have written into
    for source in range(call.world_size):
        if source != call.rank:
            total = total + call.blocks[source]
    return total.to(own.dtype)


def _reduce_launch(domain: OverlapDomain, call: Call, own: torch.Tensor, y: torch.Tensor) -> Launch:
    from ..kernels.gemm_reduce_scatter import reduce_partials_kernel

    block = 1024
    arguments = dict(
        own_ptr=own, received_ptr=call.blocks, y_ptr=y, size=own.numel(), rank=call.rank, abort_ptr=domain.fault.abort
    )  # fmt: skip
    constants = dict(WORLD=call.world_size, BLOCK=block)
    grid = (-(-own.numel() // block),)
    return Launch(reduce_partials_kernel, grid, arguments, constants, (("own_ptr",), ("y_ptr",)))


SCATTERS: dict[str, Callable[[OverlapDomain, EnginePlan, Tag, torch.Tensor, torch.Tensor], Scatter]] = {
    "collective": CollectiveScatter,
    "chunked": ChunkedScatter,
    "fused": FusedScatter,
    "direct": DirectScatter,
    "low_latency": LowLatencyScatter,
}


def _across_nodes(
    domain: OverlapDomain, plan: EnginePlan
) -> Callable[[OverlapDomain, EnginePlan, Tag, torch.Tensor, torch.Tensor], Scatter]:
    if plan.method == "collective":
        return SCATTERS[plan.method]
    from .node_streams import NodeStreamScatter  # which is made of what is above

    return NodeStreamScatter if isinstance(domain.engine, NodeStreamEngine) else NodeScatter
