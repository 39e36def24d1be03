"""`fused` across nodes on CPU processes: one interpreted kernel multiplies what arrives, or what leaves in the order of the legs.

A gather and an A2A + GEMM send as `chunked` does (node_processes.py), and their kernel waits for each chunk. Of the others
everything that leaves is enqueued first and waits until its tiles are counted: the interpreter returns at the end of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..planning.schedule.legs import Leg
from ..protocol.node_engine import NodeEngine
from ..protocol.node_slot import NodeCall
from . import persistent
from .all_gather_gemm import FusedGather
from .all_to_all_gemm import FusedAllToAllGemm
from .gemm_all_to_all import FusedGemmAllToAll, new_blocks
from .kernel_args import ScatterOperands
from .node_processes import NodeAllToAllGemm, NodeGather, NodeGemmAllToAll, NodeScatter


class FusedNodeGather(FusedGather, NodeGather):
    """AG + GEMM: NodeGather's sends, FusedGather's kernel."""


class FusedNodeAllToAllGemm(FusedAllToAllGemm, NodeAllToAllGemm):
    """A2A + GEMM: NodeAllToAllGemm's sends, FusedAllToAllGemm's kernel."""


class FusedNodeScatter(NodeScatter):
    """GEMM + RS: a sum of the node waits for its own tiles, too."""

    def start(self) -> None:
        engine = self._open()
        own = self._partials[self._domain.rank]
        operands = ScatterOperands(self._a, self._b, self._partials, own)
        _multiply_and_send(self, engine, operands, lambda leg: self._send_sum(engine.network, leg))


class FusedNodeGemmAllToAll(FusedGemmAllToAll, NodeGemmAllToAll):
    """GEMM + A2A: each chunk leaves when its tiles are counted."""

    def start(self) -> None:
        engine = self._domain.engine
        assert isinstance(engine, NodeEngine)
        staging = new_blocks(self._domain, self._a, self._b)
        self._open()
        self._call.next_epoch()
        send = partial(_send_block, engine, self._call, staging)
        _multiply_and_send(self, engine, self._operands(staging), send)


def _send_block(engine: NodeEngine, call: NodeCall, staging: torch.Tensor, leg: Leg) -> None:
    engine.send(call, staging[leg.block], leg)


def _multiply_and_send(
    operator: FusedNodeScatter | FusedNodeGemmAllToAll, engine: NodeEngine, operands: ScatterOperands,
    send: Callable[[Leg], None],
) -> None:  # fmt: skip
    """Enqueue what leaves after its tiles, then run the kernel that writes `operands.staging`. send: over the network, a leg
    whose tiles are counted."""
    domain, call, plan = operator._domain, operator._call, operator._plan
    staging, tiles = operands.staging, persistent.tiles_of_chunk(plan, operands.y)
    assert staging is not None
    for leg in plan.legs.network:
        engine.after_tiles(call.stored_tiles(leg.block, leg.chunk), tiles, partial(send, leg))
    routes = call.routes(plan.legs.inside, tiles)
    engine.launch(lambda: persistent.multiply_and_send(domain, call, plan, operands), staging, routes)
