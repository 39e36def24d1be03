"""`fused` across nodes on GPUs: one persistent kernel multiplies, while exchanges cross the network (protocol/node_streams.py).

    AG + GEMM     exchange 1; the kernel, for the own node's rows; then for each chunk of a far node: let its exchange arrive,
                  count what is here; the kernel again, which goes on that far. Further exchanges are enqueued in between
                  (planning/schedule/turns.py)
    A2A + GEMM    exchange 1; then for each chunk: start and let arrive its exchanges, count what is here; the kernel, which goes
                  on that far
    GEMM + RS, GEMM + A2A
                  the kernel; then, in the order of its tiles, what leaves: each chunk after its tiles are counted. A chunk for a
                  far node is added up first (GEMM + RS). Some exchanges leave after a weight gradient, where there is one

No product's kernel waits for the network (kernels/arrivals.py): waits of one warp do. What runs beside the kernel finds room on
the SMs that it leaves (EnginePlan.spared_sms). Nothing that waits for the kernel's tiles stands before it in a hardware queue.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from ..gpu.launch import Launch
from ..planning.schedule.kinds import A2A_GEMM
from ..planning.schedule.legs import Leg
from ..protocol.node_slot import NodeCall
from ..protocol.node_streams import NodeStreamEngine
from ..runtime.domain import OverlapDomain
from . import persistent
from .all_gather_gemm import FusedGather
from .all_to_all_gemm import FusedAllToAllGemm
from .crossings import Sent
from .gemm_all_to_all import FusedGemmAllToAll
from .kernel_args import GatherOperands, ScatterOperands
from .node_exchanges import NodeStreamAllToAllGemm, NodeStreamGemmAllToAll
from .node_streams import NodeStreamGather, NodeStreamScatter


class FusedNodeStreamGather(FusedGather, NodeStreamGather):
    """AG + GEMM (a Gather): NodeStreamGather's exchanges, FusedGather's kernel, launched again for each chunk of a far node."""

    def _multiply(self, operands: GatherOperands) -> None:
        operands = persistent.readable(self._plan, operands)  # once for all launches
        topology, crossings, chunks = self._domain.topology, self._plan.crossings, self._call.chunks
        super()._multiply(replace(operands, leaves=True))
        for turn, crossing in enumerate(crossings):
            self._crossings.go_ahead(chunks + turn, chunks * topology.nodes)
            self._crossings.bring(turn + 1)
            node = topology.ranks_of(crossing.received.source // topology.local)
            self._call.wait_chunk(node[0], crossing.received.chunk, len(node))
            super()._multiply(operands if crossing is crossings[-1] else _counted(self, operands))


class FusedNodeStreamAllToAllGemm(FusedAllToAllGemm, NodeStreamAllToAllGemm):
    """A2A + GEMM (a Receiver): NodeStreamAllToAllGemm's exchanges, FusedAllToAllGemm's kernel, launched for each chunk, of which
    every tile needs all ranks' blocks."""

    def _multiply(self, operands: GatherOperands) -> None:
        operands, chunks = persistent.readable(self._plan, operands), self._call.chunks
        for chunk in range(chunks):
            self._crossings.bring_chunk(chunk)
            self._call.wait_chunk(0, chunk, self._domain.world_size)
            super()._multiply(operands if chunk == chunks - 1 else _counted(self, operands))


def _counted(operator: FusedNodeStreamGather | FusedNodeStreamAllToAllGemm, operands: GatherOperands) -> GatherOperands:
    """Count what is here; the operands of a launch that takes this and leaves."""
    domain, call, kind = operator._domain, operator._call, operator._plan.kind
    call.launches.run(("count", kind), (), partial(_count_launch, domain, call, kind))
    return replace(operands, leaves=True)


def _count_launch(domain: OverlapDomain, call: NodeCall, kind: str) -> Launch:
    from ..kernels.arrivals import count_arrivals_kernel

    slot, constants = call.slot, dict(WORLD=domain.world_size, LOCAL=domain.topology.local, CHUNKS=call.chunks)
    arguments = dict(here_ptr=slot.counters.here, signals_ptr=slot.signals, epoch_ptr=slot.epoch, rank=domain.rank)
    return Launch(count_arrivals_kernel, (1,), arguments, constants | dict(EXCHANGE=kind == A2A_GEMM, num_warps=1))


class FusedNodeStreamScatter(NodeStreamScatter):
    """GEMM + RS (a Scatter). A sum of the node waits for its own tiles, in the sending stream; nobody waits in the kernel."""

    def start(self) -> None:
        self._a = persistent.operand(self._plan, self._a)
        engine, call, plan = self._open(), self._call, self._plan
        # What an earlier call of the operator still sends and receives is enqueued after the kernel: with one hardware queue the
        # kernel would come after its waits for the network. Nothing is lost by sending it after this, because between the calls
        # the caller's stream has no product.
        engine.send_after_this()
        own = self._partials[self._domain.rank]
        self._tiles = _launch(self, engine, ScatterOperands(self._a, self._b, self._partials, own))
        for _, legs in plan.legs.by_block:
            for leg in legs.network:
                self._crossings.send(*self._sum_for(leg))
            engine.push_counted(self._partials, call.routes(legs.inside, self._tiles))

    def _make_sum(self, twin: int, chunk: int, total: torch.Tensor) -> None:
        self._engine.wait_for_tiles(self._call.stored_tiles(twin, chunk), self._tiles)
        super()._make_sum(twin, chunk, total)


class FusedNodeStreamGemmAllToAll(FusedGemmAllToAll, NodeStreamGemmAllToAll):
    """GEMM + A2A (an Exchange). Each chunk leaves when its tiles are counted."""

    def start(self) -> None:
        self._a = persistent.operand(self._plan, self._a)
        engine, self._staging = self._begin()
        self._engine = engine
        engine.send_after_this()  # as in FusedNodeStreamScatter
        self._tiles = _launch(self, engine, self._operands(self._staging))
        for crossing in self._plan.crossings:
            self._crossings.send(*self._sent(crossing.sent))
        engine.push_counted(self._staging, self._call.routes(self._plan.legs.inside, self._tiles))

    def _sent(self, leg: Leg) -> Sent:
        part, _ = super()._sent(leg)
        return part, partial(self._engine.wait_for_tiles, self._call.stored_tiles(leg.block, leg.chunk), self._tiles)


def _launch(
    operator: FusedNodeStreamScatter | FusedNodeStreamGemmAllToAll, engine: NodeStreamEngine, operands: ScatterOperands
) -> int:
    """Launch the kernel that writes `operands.staging`; the tiles that it counts of a chunk."""
    domain, call, plan = operator._domain, operator._call, operator._plan
    assert operands.staging is not None and isinstance(call, NodeCall)
    engine.launch(lambda: persistent.multiply_and_send(domain, call, plan, operands), operands.staging, [])
    return persistent.tiles_of_chunk(plan, operands.y)
