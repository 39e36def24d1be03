"""`chunked` all-to-alls across nodes on GPUs: one block is multiplied while the next crosses the network.

    A2A + GEMM    exchange 1, the own node's products, then for each chunk: enqueue the next exchange, let this one arrive,
                  multiply it; with the blocks before it where they are shallow
    GEMM + A2A    for each chunk of a far rank: multiply, let the exchange before the last arrive, start its own; then the own
                  node

A rank exchanges with its twins. What it receives for another rank of its node it passes on (protocol/node_streams.py), so each
block waits for the steps of two ranks. All ranks enqueue the same steps in the same order: whatever a step waits for was
enqueued, everywhere, in it or before.
"""

from __future__ import annotations

import torch

from ..planning.schedule.crossings import Crossing
from ..planning.schedule.order import multiplied_together
from ..protocol.node_slot import NodeCall
from ..protocol.node_streams import NodeStreamEngine
from .all_to_all_gemm import ChunkedAllToAllGemm, add_product_in_fp32, product_in_fp32
from .crossings import Crossings, OperandCrossings
from .gemm_all_to_all import ChunkedGemmAllToAll, new_blocks


class NodeStreamAllToAllGemm(ChunkedAllToAllGemm):
    """A2A + GEMM across nodes of GPUs (a Receiver). Far ranks' blocks cross the network while the own node's are multiplied."""

    _call: NodeCall

    def _push(self) -> None:
        call, engine = self._call, self._domain.engine
        assert isinstance(engine, NodeStreamEngine)
        self._engine = engine
        call.next_epoch()
        self._crossings = OperandCrossings(engine, call, self._plan.crossings, self._part)
        self._send(self._plan.legs.inside)

    def _part(self, crossing: Crossing) -> torch.Tensor:
        return self._sent[crossing.sent.block].chunk(self._call.chunks)[crossing.sent.chunk]

    def matmul(self, b_kn: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        topology, plan = self._domain.topology, self._plan
        self._b_blocks = b_kn.chunk(topology.world, dim=0)
        first, *others = multiplied_together(topology, plan.together)
        with self._engine.products(plan.send_sms):
            total = product_in_fp32(*self._of_own_node(first))
            for blocks in others:
                if blocks[0] in topology.ranks_of(topology.node):
                    add_product_in_fp32(total, *self._of_own_node(blocks))
                else:
                    self._add_far(blocks, total)
        self._arrived = True
        return y.copy_(total)

    def _of_own_node(self, blocks: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for these blocks of the own node; return them side by side, and their rows of b."""
        call, own = self._call, self._domain.rank
        for block in blocks:
            if block != own:
                call.wait(block)
        parts = [self._sent[own] if block == own else call.blocks[block] for block in blocks]
        return _joined(parts, 1), _joined([self._b_blocks[block] for block in blocks], 0)

    def _add_far(self, blocks: tuple[int, ...], total: torch.Tensor) -> None:
        """total += these blocks, side by side, @ their rows of b; of the last one each chunk as it comes."""
        call, b = self._call, _joined([self._b_blocks[block] for block in blocks], 0)
        for chunk, rows in enumerate(total.chunk(call.chunks)):
            for _ in range((len(blocks) - 1) * call.chunks * (chunk == 0) + 1):
                self._crossings.go_on()
            for block in blocks:
                call.wait_chunk(block, chunk)
            add_product_in_fp32(rows, _joined([call.chunk_of(block, chunk) for block in blocks], 1), b)

    def received_view(self) -> torch.Tensor:
        self._crossings.finish()
        return super().received_view()


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class NodeStreamGemmAllToAll(ChunkedGemmAllToAll):
    """GEMM + A2A across nodes of GPUs (an Exchange). The columns of far ranks are multiplied first, and cross the network while
    the own node's are."""

    _call: NodeCall

    def start(self) -> None:
        domain, plan = self._domain, self._plan
        engine, staging = self._begin()
        call, columns = self._call, self._b.chunk(domain.world_size, dim=1)
        with engine.products(plan.spared_sms):
            while (crossing := self._crossings.next) is not None:
                block, chunk = crossing.sent.block, crossing.sent.chunk
                part = staging[block].chunk(call.chunks)[chunk]
                torch.mm(self._a.chunk(call.chunks)[chunk], columns[block], out=part)
                self._crossings.start_after_this(part)
            for target, legs in plan.legs.inside.by_target:
                torch.mm(self._a, columns[target], out=staging[target])
                engine.push(staging, call.routes(legs))
            torch.mm(self._a, columns[domain.rank], out=self._own_place())

    def _begin(self) -> tuple[NodeStreamEngine, torch.Tensor]:
        """The call and its exchanges, of which none has begun; the engine, and memory [W, M/W, N/W] for what is multiplied."""
        domain, plan, engine = self._domain, self._plan, self._domain.engine
        assert isinstance(engine, NodeStreamEngine)
        staging = new_blocks(domain, self._a, self._b)
        call = domain.workspace.open(staging.shape[1:], staging.dtype, self._tag, plan.chunks)
        assert isinstance(call, NodeCall)
        self._call = call
        call.next_epoch()
        self._crossings = Crossings(engine, call, plan.crossings)
        return engine, staging

    def received(self) -> torch.Tensor:
        self._crossings.finish()
        return super().received()
