"""`chunked` all-to-alls across nodes on GPUs: one block, or chunk, is multiplied while the next crosses the network.

    A2A + GEMM    exchange 1, the own node's products, then for each chunk: let its exchange arrive, multiply it; with the blocks
                  before it where they are shallow. Further exchanges are enqueued in between. Between two ranks, in many chunks
                  (EnginePlan.by_rows): exchange 1, the own terms of the first chunk and of the last two, exchanges 2 and 3;
                  then for one or two chunks at a time: let their exchanges arrive, multiply both blocks side by side, or of the
                  first and the last ones the peer's terms alone, which are added in fp32
    GEMM + A2A    for each chunk of a far rank: multiply, let the exchange before the last arrive, start its own; the own node's
                  products in between. Some exchanges start after a weight gradient, where there is one

A rank exchanges with its twins. What it receives for another rank of its node it passes on (protocol/node_streams.py), so each
block waits for the steps of two ranks. All ranks enqueue the same steps in the same order (planning/schedule/turns.py): whatever
a step waits for was enqueued, everywhere, in it or before.
"""

from __future__ import annotations

import torch

from ..planning.schedule.crossings import Crossing
from ..planning.schedule.legs import Leg
from ..planning.schedule.order import chunks_by_rows, multiplied_together
from ..protocol.node_slot import NodeCall
from ..protocol.node_streams import NodeStreamEngine
from .all_to_all_gemm import ChunkedAllToAllGemm, add_product_in_fp32, product_in_fp32
from .crossings import OperandCrossings, ResultCrossings, Sent
from .gemm_all_to_all import ChunkedGemmAllToAll, new_blocks


class NodeStreamAllToAllGemm(ChunkedAllToAllGemm):
    """A2A + GEMM across nodes of GPUs (a Receiver). Far ranks' blocks cross the network while the own node's are multiplied."""

    _call: NodeCall

    def _push(self) -> None:
        call, engine = self._call, self._domain.engine
        assert isinstance(engine, NodeStreamEngine)
        self._engine = engine
        call.next_epoch()
        self._crossings = OperandCrossings(engine, call, self._plan, self._part)
        self._crossings.start()
        self._send(self._plan.legs.inside)

    def _part(self, crossing: Crossing) -> torch.Tensor:
        return self._sent[crossing.sent.block].chunk(self._call.chunks)[crossing.sent.chunk]

    def matmul(self, b_kn: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self._b_blocks = b_kn.chunk(self._domain.world_size, dim=0)
        with self._engine.products(self._plan.send_sms):
            if self._plan.by_rows:
                self._multiply_rows(b_kn, y)
            else:
                y.copy_(self._sum_of_blocks())
        self._arrived = True
        return y

    def _multiply_rows(self, b_kn: torch.Tensor, y: torch.Tensor) -> None:
        """y = both ranks' blocks, side by side, @ b_kn, a few chunks at a time. Of the first and the last of these the own terms
        are multiplied while the first chunk crosses; their sum is in fp32."""
        own, peer, call = self._domain.rank, 1 - self._domain.rank, self._call
        in_turn = chunks_by_rows(call.chunks)
        sums = {chunks: self._own_terms(chunks) for chunks in dict.fromkeys((in_turn[0], in_turn[-1]))}
        # As if the peer's terms of the first chunk were enqueued, too: so the third exchange comes before them. Behind them it
        # would begin 0.7 ms late, with one hardware queue.
        self._crossings.go_ahead(sum(map(len, sums)) + 1, 2 * call.chunks)
        for chunks in in_turn:
            self._crossings.bring(chunks[-1] + 1)
            rows = call.wait_chunks(peer, chunks)
            blocks = {own: self._sent[own][rows], peer: call.blocks[peer][rows]}
            if chunks in sums:
                add_product_in_fp32(sums[chunks], blocks[peer], self._b_blocks[peer])
                y[rows].copy_(sums.pop(chunks))
            else:
                torch.mm(torch.cat([blocks[0], blocks[1]], 1), b_kn, out=y[rows])

    def _own_terms(self, chunks: range) -> torch.Tensor:
        own, rows = self._domain.rank, self._call.chunk_rows(chunks[0], len(chunks))
        return product_in_fp32(self._sent[own][rows], self._b_blocks[own])

    def _sum_of_blocks(self) -> torch.Tensor:
        """The products of all blocks with their rows of b, in fp32, in the order in which they arrive."""
        topology = self._domain.topology
        first, *others = multiplied_together(topology, self._plan.together)
        total, done = product_in_fp32(*self._of_own_node(first)), len(first)
        for blocks in others:
            if done < topology.local:
                self._crossings.go_ahead(done, topology.world)
                add_product_in_fp32(total, *self._of_own_node(blocks))
            else:
                self._add_far(blocks, done, total)
            done += len(blocks)
        return total

    def _of_own_node(self, blocks: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for these blocks of the own node; return them side by side, and their rows of b."""
        call, own = self._call, self._domain.rank
        for block in blocks:
            if block != own:
                call.wait(block)
        parts = [self._sent[own] if block == own else call.blocks[block] for block in blocks]
        return _joined(parts, 1), _joined([self._b_blocks[block] for block in blocks], 0)

    def _add_far(self, blocks: tuple[int, ...], done: int, total: torch.Tensor) -> None:
        """total += these blocks, side by side, @ their rows of b; of the last one each chunk as it comes. done: blocks before."""
        call, b = self._call, _joined([self._b_blocks[block] for block in blocks], 0)
        brought = (done - self._domain.topology.local + len(blocks) - 1) * call.chunks
        for chunk, rows in enumerate(total.chunk(call.chunks)):
            self._crossings.go_ahead(done * call.chunks + chunk * len(blocks), self._domain.world_size * call.chunks)
            self._crossings.bring(brought + chunk + 1)
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
        engine, self._staging = self._begin()
        self._columns = self._b.chunk(self._domain.world_size, dim=1)
        with engine.products(self._plan.spared_sms):
            self._crossings.enqueue(self._domain.topology, self._multiply_chunk, self._sent)

    def _multiply_chunk(self, block: int, chunk: int) -> None:
        """A chunk of the columns of rank `block`, which is pushed if that is another rank of this node."""
        chunks, inside = self._call.chunks, self._plan.legs.inside
        into = self._own_place() if block == self._domain.rank else self._staging[block]
        torch.mm(self._a.chunk(chunks)[chunk], self._columns[block], out=into.chunk(chunks)[chunk])
        if (place := inside.places.get((block, chunk))) is not None:
            self._domain.engine.push(self._staging, [self._call.routes(inside)[place]])

    def _sent(self, leg: Leg) -> Sent:
        """A chunk of the columns for another node. Its product has filled it."""
        return self._staging[leg.block].chunk(self._call.chunks)[leg.chunk], None

    def _begin(self) -> tuple[NodeStreamEngine, torch.Tensor]:
        """The call and its exchanges, of which none has begun; the engine, and memory [W, M/W, N/W] for what is multiplied."""
        domain, plan, engine = self._domain, self._plan, self._domain.engine
        assert isinstance(engine, NodeStreamEngine)
        staging = new_blocks(domain, self._a, self._b)
        call = domain.workspace.open(staging.shape[1:], staging.dtype, self._tag, plan.chunks)
        assert isinstance(call, NodeCall)
        self._call = call
        call.next_epoch()
        self._crossings = ResultCrossings(engine, call, plan)
        return engine, staging

    def received(self) -> torch.Tensor:
        self._crossings.finish()
        return super().received()
