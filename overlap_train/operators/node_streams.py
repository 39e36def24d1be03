"""`chunked` across nodes on GPUs: some chunks are multiplied while the next ones cross the network (protocol/node_streams.py).

    gather     exchange 1, own node's products, then for a few chunks at a time (schedule/order.py: chunks_after_own): let their
               exchanges arrive, multiply them; further exchanges are enqueued in between
    scatter    for each chunk of a far twin: multiply, add what the node's ranks have for it, start its exchange; the own node's
               products in between. The sums of the other nodes arrive last. Some exchanges start after a weight gradient,
               where there is one

All ranks enqueue the same steps in the same order (planning/schedule/turns.py), so that twins start their exchanges alike and
whatever a step waits for was enqueued, everywhere, in a step before it.
"""

from __future__ import annotations

from functools import partial

import torch

from ..gpu.launch import Launch
from ..planning.schedule.crossings import Crossing
from ..planning.schedule.legs import Leg
from ..protocol.node_slot import NodeCall
from ..protocol.node_streams import NodeStreamEngine
from ..symmetric.node_sums import grid_of
from .crossings import OperandCrossings, ResultCrossings, Sent
from .gemm_reduce_scatter import ChunkedScatter
from .node_processes import NodeGather
from .persistent import aligned


class NodeStreamGather(NodeGather):
    """AG + GEMM across nodes of GPUs (a Gather). Some chunks are multiplied while the next ones cross the network."""

    def _push(self) -> None:
        call, engine = self._call, self._domain.engine
        assert isinstance(engine, NodeStreamEngine)
        self._engine = engine
        call.next_epoch()
        self._crossings = OperandCrossings(engine, call, self._plan, self._part)
        self._crossings.start()
        engine.push(self._own, call.routes(self._plan.legs.inside))

    def _part(self, crossing: Crossing) -> torch.Tensor:
        return self._own.chunk(self._call.chunks)[crossing.sent.chunk]

    def _go_ahead(self, done: int, parts: int) -> None:
        self._crossings.go_ahead(done, parts)

    def _bring(self, count: int) -> None:
        self._crossings.bring(count)

    def matmul(self, b_kn: torch.Tensor) -> torch.Tensor:
        with self._engine.products(self._plan.send_sms):
            return super().matmul(b_kn)

    def gathered_view(self) -> torch.Tensor:
        self._crossings.finish()
        return super().gathered_view()


class NodeStreamScatter(ChunkedScatter):
    """GEMM + RS across nodes of GPUs (a Scatter). The products for far nodes come first; this node's sums of them cross the
    network while later products run."""

    _call: NodeCall

    def start(self) -> None:
        engine, plan = self._open(), self._plan
        with engine.products(plan.spared_sms):
            self._crossings.enqueue(self._domain.topology, self._multiply_chunk, self._sum_for)

    def _multiply_chunk(self, block: int, chunk: int) -> None:
        """The partial sum for a chunk of the rows of rank `block`, which is pushed if another rank of this node adds it up."""
        part = self._chunk(self._partials, block, chunk)
        torch.mm(self._chunk(self._rows, block, chunk), self._b, out=part)
        inside = self._plan.legs.inside
        if (place := inside.places.get((block, chunk))) is not None:
            self._domain.engine.push(self._partials, [self._call.routes(inside)[place]])

    def _open(self) -> NodeStreamEngine:
        """The call, memory for what is multiplied and added, and its exchanges, of which none has begun."""
        domain, plan, world = self._domain, self._plan, self._domain.world_size
        engine = domain.engine
        assert isinstance(engine, NodeStreamEngine)
        self._engine = engine
        self._rows = self._a.unflatten(0, (world, -1))
        self._partials = self._a.new_empty(world, self._a.shape[0] // world, self._b.shape[1])
        far = domain.topology.nodes - 1 if domain.topology.local > 1 else 0  # a node of one rank sends its partials
        self._sums = self._partials.new_empty(far, *self._partials.shape[1:])
        call = domain.workspace.open(self._partials.shape[1:], self._a.dtype, self._tag, plan.chunks)
        assert isinstance(call, NodeCall)
        self._call = call
        call.next_epoch()
        self._crossings = ResultCrossings(engine, call, plan)
        return engine

    def _chunk(self, blocks: torch.Tensor, block: int, chunk: int) -> torch.Tensor:
        return blocks[block].chunk(self._call.chunks)[chunk]

    def _sum_for(self, leg: Leg) -> Sent:
        """Memory for what the ranks of this node have for the twin's chunk that leaves, and what adds it up there."""
        topology = self._domain.topology
        if topology.local == 1:
            total = self._chunk(self._partials, leg.block, leg.chunk)
        else:  # a block for each far node, the following one first
            far = (leg.block // topology.local - topology.node) % topology.nodes - 1
            total = self._chunk(self._sums, far, leg.chunk)
        return total, partial(self._make_sum, leg.block, leg.chunk, total)

    def _make_sum(self, twin: int, chunk: int, total: torch.Tensor) -> None:
        """total = what the ranks of this node have for a chunk of `twin`: the own one, then the others in rank order."""
        others = self._others(twin)
        if not others:
            return  # a node of one rank: `total` is the own one
        self._wait_for_node(twin, chunk)
        received = self._call.blocks[:, self._call.chunk_rows(chunk)]
        own = self._chunk(self._partials, twin, chunk)
        add_blocks(self._call, own, received, others, total, self._plan.reduce_sms)

    def _wait_for_node(self, twin: int, chunk: int) -> None:
        """Hold the stream until this node's other ranks have put here what they have for a chunk of `twin`.

        They are the ranks before and after `twin` in its node: one wait each. Its own block is not theirs, and comes last of all:
        who waited for it here would wait for a sum that needs this one.
        """
        node = self._domain.topology.ranks_of(twin // self._domain.topology.local)
        for ranks in (range(node.start, twin), range(twin + 1, node.stop)):
            if ranks:
                self._call.wait_chunk(ranks.start, chunk, len(ranks))

    def _others(self, twin: int) -> list[int]:
        """The blocks in which this node's other ranks put what they have for `twin`."""
        topology = self._domain.topology
        return [block for block in topology.ranks_of(twin // topology.local) if block != twin]

    def finish(self) -> torch.Tensor:
        """The sum y [M/W, N]: the own node's partials first, then the sums of the other nodes, in order of nodes."""
        topology, call = self._domain.topology, self._call
        self._crossings.finish()
        beside, node = self._others(topology.rank), topology.ranks_of(topology.node)
        if beside:
            call.wait(node.start, len(node))
        twins = [topology.twin(far) for far in range(topology.nodes) if far != topology.node]
        for block in twins:
            call.wait(block)
        own = self._partials[topology.rank]
        y = torch.empty_like(own)
        add_blocks(call, own, call.blocks, beside + twins, y)
        return y


def add_blocks(
    call: NodeCall, own: torch.Tensor, received: torch.Tensor, order: list[int], y: torch.Tensor, sms: int = 0
) -> None:  # fmt: skip
    """y = own [rows, N] + received [W, rows, N] of the blocks in `order`, in that order, summed in fp32. They are here.

    sms: that it may hold; 0: all, with the same bits.
    """
    values = (own.data_ptr(), y.data_ptr())
    key = ("add", tuple(order), received.data_ptr(), aligned(*values), sms)
    call.launches.run(key, values, partial(_add_launch, call, own, received, order, y, sms))


def _add_launch(
    call: NodeCall, own: torch.Tensor, received: torch.Tensor, order: list[int], y: torch.Tensor, sms: int
) -> Launch:
    from ..kernels.add_blocks import WARPS, add_blocks_kernel

    programs, block = grid_of(own, len(order), sms)
    arguments = dict(
        own_ptr=own, received_ptr=received, order_ptr=call.order(tuple(order)), y_ptr=y, size=own.numel(),
        pitch=received.stride(0), abort_ptr=call.abort,
    )  # fmt: skip
    constants = dict(COUNT=len(order), BLOCK=block, num_warps=WARPS)
    return Launch(add_blocks_kernel, (programs,), arguments, constants, (("own_ptr",), ("y_ptr",)))
