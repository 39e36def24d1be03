"""`chunked` across nodes on CPU processes: what waits for the network has a thread of its own (protocol/node_engine.py).

`fused` across nodes on CPU processes: one interpreted kernel multiplies what arrives, or what leaves in the order of the legs.

A gather and an A2A + GEMM send as `chunked` does (node_processes.py), and their kernel waits for each chunk. Of the others
everything that leaves is enqueued first and waits until its tiles are counted: the interpreter returns at the end of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from ..group.copy_engine import run_push
from ..ops import launch
from ..ops.a2a_gemm import ChunkedAllToAllGemm, FusedAllToAllGemm
from ..ops.ag_gemm import ChunkedGather, FusedGather
from ..ops.gemm_a2a import ChunkedGemmAllToAll, FusedGemmAllToAll, new_blocks
from ..ops.gemm_rs import ChunkedScatter
from ..ops.launch import ScatterOperands
from ..schedule.inter_node import Crossing
from ..schedule.order import chunks_after_own
from ..schedule.transfers import Leg, Legs
from .gloo import GlooTransport
from .host_engine import NodeEngine
from .slots import NodeCall


class NodeGather(ChunkedGather):
    """AllGather + GEMM: the network first, then the own node; each chunk that arrives from far is passed on inside the
    node."""

    _call: NodeCall

    def _push(self) -> None:
        call, engine, legs = self._call, self._domain.engine, self._plan.legs
        assert isinstance(engine, NodeEngine)
        call.next_epoch()
        for leg in legs.network:
            engine.send(call, self._own, leg)
        engine.push(self._own, call.routes(legs.inside))
        for crossing in self._plan.crossings:
            engine.later.run(partial(self._pass_on, crossing))

    def _pass_on(self, crossing: Crossing) -> None:
        self._call.wait_chunk(crossing.received.fills, crossing.received.chunk)
        for route in self._call.routes(crossing.passed_on):
            run_push(route.push(self._call.blocks))

    def matmul(self, b_kn: torch.Tensor) -> torch.Tensor:
        """Multiply blocks of the own node whole, and those of each far node a few chunks at a time (order.py: chunks_after_own),
        in the order in which they come."""
        call, topology, world = self._call, self._domain.topology, self._domain.world_size
        y = self._own.new_empty(self._own.shape[0] * world, b_kn.shape[1])
        blocks, near = y.unflatten(0, (world, -1)), topology.local - 1
        torch.mm(self._own, b_kn, out=blocks[self._domain.rank])
        for done, source in enumerate(self._plan.sources[:near], start=1):
            self._go_ahead(done, world)
            call.wait(source)
            torch.mm(call.blocks[source], b_kn, out=blocks[source])
        for node, chunks in product(range(1, topology.nodes), chunks_after_own(topology, call.chunks)):
            turn = (node - 1) * call.chunks
            self._go_ahead(call.chunks + turn + chunks[0], call.chunks * topology.nodes)
            self._bring(turn + chunks[-1] + 1)
            first = node * topology.local - 1
            for source in self._plan.sources[first : first + topology.local]:
                rows = call.wait_chunks(source, chunks)
                torch.mm(call.blocks[source][rows], b_kn, out=blocks[source][rows])
        self._arrived = True
        return y

    def _go_ahead(self, done: int, parts: int) -> None:
        """Called when `done` of `parts` equal parts of the product are enqueued: on GPUs (node_streams.py)."""

    def _bring(self, count: int) -> None:
        """Called before what the first `count` crossings bring is waited for: on GPUs (node_streams.py)."""


class NodeScatter(ChunkedScatter):
    """GEMM + ReduceScatter, far nodes first: the blocks of a node go to its ranks' twins in this node, each of which adds them
    up and sends the sum. Sums and sends run beside the GEMMs of the next node."""

    _call: NodeCall

    def _start(self) -> None:
        engine, call, own = self._open(), self._call, self._domain.rank
        rows = self._a.unflatten(0, (self._domain.world_size, -1))
        for block, legs in self._plan.legs.by_block:
            for leg in legs.network:
                part = call.chunk_rows(leg.chunk)
                torch.mm(rows[block, part], self._b, out=self._partials[block, part])
                engine.later.run(partial(self._send_sum, engine.network, leg))
            if legs.inside.all:
                torch.mm(rows[block], self._b, out=self._partials[block])
                engine.push(self._partials, call.routes(legs.inside))
        torch.mm(rows[own], self._b, out=self._partials[own])

    def _open(self) -> NodeEngine:
        """The call, and memory for what is multiplied."""
        domain, world = self._domain, self._domain.world_size
        self._partials = self._a.new_empty(world, self._a.shape[0] // world, self._b.shape[1])
        call = domain.workspace.open(self._partials.shape[1:], self._a.dtype, self._tag, self._plan.chunks)
        call.next_epoch()
        assert isinstance(call, NodeCall) and isinstance(domain.engine, NodeEngine)
        self._call = call
        return domain.engine

    def _send_sum(self, network: GlooTransport, leg: Leg) -> None:
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
        """The sum y [M/W, N]: the own node's partials first, then the sums of the other nodes, in order of nodes."""
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


class NodeGemmAllToAll(ChunkedGemmAllToAll):
    """GEMM + AllToAll: the columns of far ranks leave first, over the network, while those of the own node are computed."""

    _call: NodeCall

    def _send(self, staging: torch.Tensor, legs: Legs) -> None:
        engine = self._domain.engine
        assert isinstance(engine, NodeEngine)
        for leg in legs.network:
            engine.send(self._call, staging[leg.block], leg)
        super()._send(staging, legs.inside)


class NodeAllToAllGemm(ChunkedAllToAllGemm):
    """AllToAll + GEMM: blocks of far ranks leave first, over the network; the own node's are multiplied first."""

    _call: NodeCall

    def _send(self, legs: Legs) -> None:
        engine = self._domain.engine
        assert isinstance(engine, NodeEngine)
        for leg in legs.network:
            engine.send(self._call, self._sent[leg.block], leg)
        super()._send(legs.inside)


class FusedNodeGather(FusedGather, NodeGather):
    """AG + GEMM: NodeGather's sends, FusedGather's kernel."""


class FusedNodeAllToAllGemm(FusedAllToAllGemm, NodeAllToAllGemm):
    """A2A + GEMM: NodeAllToAllGemm's sends, FusedAllToAllGemm's kernel."""


class FusedNodeScatter(NodeScatter):
    """GEMM + RS: a sum of the node waits for its own tiles, too."""

    def _start(self) -> None:
        engine = self._open()
        own = self._partials[self._domain.rank]
        operands = ScatterOperands(self._a, self._b, self._partials, own)
        _multiply_and_send(self, engine, operands, lambda leg: self._send_sum(engine.network, leg))


class FusedNodeGemmAllToAll(FusedGemmAllToAll, NodeGemmAllToAll):
    """GEMM + A2A: each chunk leaves when its tiles are counted."""

    def _start(self) -> None:
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
    staging, tiles = operands.staging, launch.tiles_of_chunk(plan, operands.y)
    assert staging is not None
    for leg in plan.legs.network:
        engine.after_tiles(call.stored_tiles(leg.block, leg.chunk), tiles, partial(send, leg))
    routes = call.routes(plan.legs.inside, tiles)
    engine.launch(lambda: launch.multiply_and_send(domain, call, plan, operands), staging, routes)
