"""`fused` across nodes on GPUs: one persistent kernel multiplies, while exchanges cross the network (protocol/node_streams.py).

    AG + GEMM, A2A + GEMM    exchange 1; the kernel, whose tiles wait for their chunk; then for each exchange: start the next one,
                             let this one arrive
    GEMM + RS, GEMM + A2A    the kernel; then, in the order of its tiles, what leaves: each chunk after its tiles are counted. A
                             chunk for a far node is added up first (GEMM + RS)

Whatever the kernel's tiles wait for runs beside it. It finds room on the SMs that the kernel leaves (EnginePlan.spared_sms).
Nothing that waits for the kernel's tiles stands before it in a hardware queue.
"""

from __future__ import annotations

from functools import partial

import torch

from ..protocol.node_slot import NodeCall
from ..protocol.node_streams import NodeStreamEngine
from . import persistent
from .all_gather_gemm import FusedGather
from .all_to_all_gemm import FusedAllToAllGemm
from .gemm_all_to_all import FusedGemmAllToAll
from .kernel_args import ScatterOperands
from .node_exchanges import NodeStreamAllToAllGemm, NodeStreamGemmAllToAll
from .node_streams import NodeStreamGather, NodeStreamScatter


class FusedNodeStreamGather(FusedGather, NodeStreamGather):
    """AG + GEMM (a Gather): NodeStreamGather's exchanges, FusedGather's kernel."""

    def matmul(self, b_kn: torch.Tensor) -> torch.Tensor:
        if self._domain.topology.local > 1:  # what arrives is passed on after such a wait, beside the kernel
            self._call.load_wait()
        y = super().matmul(b_kn)
        self._crossings.finish()
        return y


class FusedNodeStreamAllToAllGemm(FusedAllToAllGemm, NodeStreamAllToAllGemm):
    """A2A + GEMM (a Receiver): NodeStreamAllToAllGemm's exchanges, FusedAllToAllGemm's kernel."""

    def matmul(self, b_kn: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        super().matmul(b_kn, y)
        self._crossings.finish()
        return y


class FusedNodeStreamScatter(NodeStreamScatter):
    """GEMM + RS (a Scatter). A sum of the node waits for its own tiles, in the sending stream; nobody waits in the kernel."""

    def start(self) -> None:
        self._a = persistent.operand(self._plan, self._a)
        engine, call, plan = self._open(), self._call, self._plan
        engine.send_after_this()
        own = self._partials[self._domain.rank]
        self._tiles = _launch(self, engine, ScatterOperands(self._a, self._b, self._partials, own))
        for block, legs in plan.legs.by_block:
            for leg in legs.network:
                self._send_sum(block, leg.chunk)
            engine.push_counted(self._partials, call.routes(legs.inside, self._tiles))

    def _make_sum(self, twin: int, chunk: int, total: torch.Tensor) -> None:
        self._engine.wait_for_tiles(self._call.stored_tiles(twin, chunk), self._tiles)
        super()._make_sum(twin, chunk, total)


class FusedNodeStreamGemmAllToAll(FusedGemmAllToAll, NodeStreamGemmAllToAll):
    """GEMM + A2A (an Exchange). Each chunk leaves when its tiles are counted."""

    def start(self) -> None:
        self._a = persistent.operand(self._plan, self._a)
        engine, staging = self._begin()
        call, crossings = self._call, self._crossings
        engine.send_after_this()
        tiles = _launch(self, engine, self._operands(staging))
        while (crossing := crossings.next) is not None:
            leg = crossing.sent
            counter, part = call.stored_tiles(leg.block, leg.chunk), staging[leg.block].chunk(call.chunks)[leg.chunk]
            crossings.start(part, partial(engine.wait_for_tiles, counter, tiles))
        engine.push_counted(staging, call.routes(self._plan.legs.inside, tiles))


def _launch(
    operator: FusedNodeStreamScatter | FusedNodeStreamGemmAllToAll, engine: NodeStreamEngine, operands: ScatterOperands
) -> int:
    """Launch the kernel that writes `operands.staging`; the tiles that it counts of a chunk."""
    domain, call, plan = operator._domain, operator._call, operator._plan
    assert operands.staging is not None and isinstance(call, NodeCall)
    engine.launch(lambda: persistent.multiply_and_send(domain, call, plan, operands), operands.staging, [])
    return persistent.tiles_of_chunk(plan, operands.y)
