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

from collections import deque
from collections.abc import Sequence
from itertools import cycle

import torch

from ..planning.schedule import Crossing, multiplied_together
from ..protocol.node_slot import NodeCall
from ..protocol.node_streams import NodeStreamEngine
from ..symmetric.inter_node import Exchange
from .all_to_all_gemm import ChunkedAllToAllGemm, add_product_in_fp32, product_in_fp32
from .gemm_all_to_all import ChunkedGemmAllToAll, new_blocks

_MOST = 2  # exchanges of a call under way: one crosses the network while the one before it is passed on


class Crossings:
    """The exchanges of one call, in order. Two are under way at most: `start` lets the older one arrive first.

    What is for another rank of this node lands in two places in turn. The exchange after the next writes into the same place; the
    engine holds it until this one has arrived and is passed on. Made before the engine is told `send_after_this`: until then the
    caller's stream may still use the memory of these places.
    """

    def __init__(self, engine: NodeStreamEngine, call: NodeCall, crossings: Sequence[Crossing]) -> None:
        self._engine, self._call, self._waiting = engine, call, deque(crossings)
        self._under_way: deque[tuple[Crossing, Exchange, torch.Tensor | None]] = deque()
        places = _MOST if any(map(self._lands, crossings)) else 0
        chunk = call.chunk_of(call.rank, 0)
        self._places = cycle(chunk.new_empty(places, *chunk.shape))

    def _lands(self, crossing: Crossing) -> bool:
        return crossing.lands and self._engine.lands

    @property
    def next(self) -> Crossing | None:
        """What `start` starts."""
        return self._waiting[0] if self._waiting else None

    def start(self, source: torch.Tensor) -> None:
        """Send `source` in the next exchange."""
        if len(self._under_way) == _MOST:
            self.arrive()
        crossing = self._waiting.popleft()
        landing = next(self._places) if self._lands(crossing) else None
        exchange = self._engine.cross(self._call, crossing, source, landing=landing)
        self._under_way.append((crossing, exchange, landing))

    def arrive(self) -> None:
        """Let the oldest exchange under way arrive, if there is one."""
        if self._under_way:
            crossing, exchange, landing = self._under_way.popleft()
            self._engine.arrive(self._call, crossing, exchange, landing)

    def arrive_all(self) -> None:
        while self._under_way:
            self.arrive()


class NodeStreamAllToAllGemm(ChunkedAllToAllGemm):
    """See Receiver."""

    _call: NodeCall

    def _push(self) -> None:
        call, engine = self._call, self._domain.engine
        assert isinstance(engine, NodeStreamEngine)
        self._engine = engine
        call.next_epoch()
        self._crossings = Crossings(engine, call, self._plan.crossings)
        engine.send_after_this()  # once, for all exchanges: they wait for no product (NodeStreamGather)
        self._start_next()
        self._send(self._plan.legs.inside)
        engine.at_end(self._finish)

    def _start_next(self) -> None:
        crossing = self._crossings.next
        if crossing is not None:
            block, chunk = crossing.sent.block, crossing.sent.chunk
            self._crossings.start(self._sent[block].chunk(self._call.chunks)[chunk])

    def _finish(self) -> None:
        while self._crossings.next is not None:
            self._start_next()
        self._crossings.arrive_all()

    def matmul(self, b_kn: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        topology, plan = self._domain.topology, self._plan
        self._b_blocks = b_kn.chunk(topology.world, dim=0)
        first, *others = multiplied_together(topology, plan.together)
        with self._engine.products(plan.sms.send):
            total = product_in_fp32(*self._of_own_node(first))
            for blocks in others:
                if blocks[0] in topology.ranks_of(topology.node):
                    add_product_in_fp32(total, *self._of_own_node(blocks))
                else:
                    self._add_far(blocks, total)
        self._arrived = True
        return y.copy_(total)

    def _of_own_node(self, blocks: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """These blocks of x side by side, and their rows of b, when they are here."""
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
                self._go_on()
            for block in blocks:
                call.wait_chunk(block, chunk)
            add_product_in_fp32(rows, _joined([call.chunk_of(block, chunk) for block in blocks], 1), b)

    def _go_on(self) -> None:
        """Enqueue the next exchange, then what lets the present one arrive: what is owed goes before what is waited for."""
        self._start_next()
        self._crossings.arrive()

    def received_view(self) -> torch.Tensor:
        self._finish()
        return super().received_view()


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class NodeStreamGemmAllToAll(ChunkedGemmAllToAll):
    """See Exchange of gemm_all_to_all.py."""

    _call: NodeCall

    def start(self) -> None:
        domain, plan, engine = self._domain, self._plan, self._domain.engine
        assert isinstance(engine, NodeStreamEngine)
        # What the operator sends besides is there already, and its reader comes first: x, which a weight gradient waits for.
        engine.finish_started()
        staging = new_blocks(domain, self._a, self._b)
        call = domain.workspace.open(staging.shape[1:], staging.dtype, self._tag, plan.chunks)
        assert isinstance(call, NodeCall)
        self._call = call
        call.next_epoch()
        self._crossings = Crossings(engine, call, plan.crossings)
        engine.at_end(self._crossings.arrive_all)
        columns = self._b.chunk(domain.world_size, dim=1)
        with engine.products(plan.sms.send):
            while (crossing := self._crossings.next) is not None:
                block, chunk = crossing.sent.block, crossing.sent.chunk
                part = staging[block].chunk(call.chunks)[chunk]
                torch.mm(self._a.chunk(call.chunks)[chunk], columns[block], out=part)
                engine.send_after_this()
                self._crossings.start(part)
            for target, legs in plan.legs.inside.by_target:
                torch.mm(self._a, columns[target], out=staging[target])
                engine.push(staging, call.routes(legs))
            torch.mm(self._a, columns[domain.rank], out=self._own_place())

    def received(self) -> torch.Tensor:
        self._crossings.arrive_all()
        return super().received()
