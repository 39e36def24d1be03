"""The operators of groups that span nodes: some chunks are multiplied while the next ones are on the network.

`chunked`, by the library:

    AG + GEMM     exchange 1, own node's products, then for a few chunks at a time (schedule/order.py: chunks_after_own): let
                  their exchanges arrive, multiply them; further exchanges are enqueued in between
    A2A + GEMM    exchange 1, the own node's products, then for each chunk: let its exchange arrive, multiply it; with the blocks
                  before it where they are shallow. Further exchanges are enqueued in between. Between two ranks, in many chunks
                  (InterNodePlan.by_rows): exchange 1, the own terms of the first chunk and of the last two, exchanges 2 and 3;
                  then for one or two chunks at a time: let their exchanges arrive, multiply both blocks side by side, or of the
                  first and the last ones the peer's terms alone, which are added in fp32
    GEMM + RS     for each chunk of a far rail peer: multiply, add what the node's ranks have for it, start its exchange; the own
                  node's products in between. The sums of the other nodes arrive last
    GEMM + A2A    for each chunk of a far rank: multiply, let the exchange before the last arrive, start its own; the own node's
                  products in between

`fused`, by one persistent kernel:

    AG + GEMM     exchange 1; the kernel, for the own node's rows; then for each chunk of a far node: let its exchange arrive,
                  count what is here; the kernel again, which goes on that far. Further exchanges are enqueued in between
    A2A + GEMM    exchange 1; then for each chunk: start and let arrive its exchanges, count what is here; the kernel, which goes
                  on that far
    GEMM + RS, GEMM + A2A
                  the kernel; then, in the order of its tiles, what leaves: each chunk after its tiles are counted. A chunk for a
                  far node is added up first (GEMM + RS)

A rank exchanges with its rail peers. What it receives for another rank of its node it passes on (engines.py). All ranks enqueue
the same steps in the same order (schedule/inter_node.py), so that rail peers start their exchanges alike, and whatever a step
waits for was enqueued, everywhere, in it or before. Some exchanges of a result start after a weight gradient, where there is one.

No product's kernel waits for the network (kernels/arrivals.py): waits of one warp do. What runs concurrently with the kernel
finds room on the SMs that it leaves (EnginePlan.sm_margin). Nothing that waits for the kernel's tiles stands before it in a
hardware queue.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import torch

from ..gpu.launch import Launch
from ..group.domain import OverlapDomain
from ..ops import launch
from ..ops.a2a_gemm import ChunkedAllToAllGemm, FusedAllToAllGemm, add_product_in_fp32, product_in_fp32
from ..ops.ag_gemm import ChunkedAllGatherGemm, FusedAllGatherGemm
from ..ops.gemm_a2a import ChunkedGemmAllToAll, FusedGemmAllToAll, new_blocks
from ..ops.gemm_rs import ChunkedGemmReduceScatter
from ..ops.launch import GatherOperands, ScatterOperands
from ..schedule.inter_node import SendRecv
from ..schedule.kinds import Kind
from ..schedule.order import Transfer, Transfers, chunks_after_own, chunks_by_rows, multiplied_together
from .engines import InterNodeEngine
from .exchanges import OperandExchanges, ResultExchanges, Sent
from .plan import InterNodePlan
from .slots import NodeCall


def engine_of(domain: OverlapDomain) -> InterNodeEngine:
    """The engine of a domain whose nodes are connected."""
    assert isinstance(domain.engine, InterNodeEngine)
    return domain.engine


class _SendsOperand:
    """What AG + GEMM and A2A + GEMM have in common: the first exchange starts, then what stays in the node."""

    _domain: OverlapDomain
    _plan: InterNodePlan
    _call: NodeCall

    def _push(self) -> None:
        self._engine = engine_of(self._domain)
        self._call.next_epoch()
        self._exchanges = OperandExchanges(self._engine, self._call, self._plan, self._part)
        self._exchanges.start()
        self._send(self._plan.transfers.inside)

    def _send(self, transfers: Transfers) -> None:
        """Push what other ranks of this node get."""
        raise NotImplementedError

    def _part(self, exchanged: SendRecv) -> torch.Tensor:
        """The chunk that an exchange sends."""
        raise NotImplementedError

    def _count_and_leave(self, operands: GatherOperands) -> GatherOperands:
        """Count what is here; the operands of a launch that takes this and leaves."""
        call, kind = self._call, self._plan.kind
        call.launches.run(("count", kind), (), partial(_count_launch, self._domain, call, kind))
        return replace(operands, leaves=True)


def _count_launch(domain: OverlapDomain, call: NodeCall, kind: Kind) -> Launch:
    from ..kernels.arrivals import count_arrivals_kernel

    slot, constants = call.slot, dict(WORLD=domain.world_size, LOCAL=domain.topology.local, CHUNKS=call.chunks)
    arguments = dict(here_ptr=slot.counters.here, signals_ptr=slot.signals, epoch_ptr=slot.epoch, rank=domain.rank)
    return Launch(count_arrivals_kernel, (1,), arguments, constants | dict(EXCHANGE=kind.sums_blocks, num_warps=1))


class InterNodeAllGatherGemm(_SendsOperand, ChunkedAllGatherGemm):
    """AG + GEMM by the library. Each chunk that arrives from a far node is passed on inside this one."""

    _plan: InterNodePlan
    _call: NodeCall

    def _send(self, transfers: Transfers) -> None:
        self._engine.push(self._own, self._call.routes(transfers))

    def _part(self, exchanged: SendRecv) -> torch.Tensor:
        return self._own.chunk(self._call.chunks)[exchanged.sent.chunk]

    def matmul(self, b_kn: torch.Tensor) -> torch.Tensor:
        """Multiply blocks of the own node whole, and those of each far node a few chunks at a time (order.py: chunks_after_own),
        in the order in which they come."""
        world = self._domain.world_size
        y = self._own.new_empty(self._own.shape[0] * world, b_kn.shape[1])
        with self._engine.products(self._plan.send_sms):
            self._multiply_blocks(b_kn, y.unflatten(0, (world, -1)))
        self._arrived = True
        return y

    def _multiply_blocks(self, b_kn: torch.Tensor, blocks: torch.Tensor) -> None:
        call, topology, world = self._call, self._domain.topology, self._domain.world_size
        torch.mm(self._own, b_kn, out=blocks[self._domain.rank])
        for done, source in enumerate(self._plan.sources[: topology.local - 1], start=1):
            self._exchanges.go_ahead(done, world)
            call.wait(source)
            torch.mm(call.blocks[source], b_kn, out=blocks[source])
        for node, chunks in product(range(1, topology.nodes), chunks_after_own(topology, call.chunks)):
            turn = (node - 1) * call.chunks
            self._exchanges.go_ahead(call.chunks + turn + chunks[0], call.chunks * topology.nodes)
            self._exchanges.bring(turn + chunks[-1] + 1)
            first = node * topology.local - 1
            for source in self._plan.sources[first : first + topology.local]:
                rows = call.wait_chunks(source, chunks)
                torch.mm(call.blocks[source][rows], b_kn, out=blocks[source][rows])

    def gathered_view(self) -> torch.Tensor:
        self._exchanges.finish()
        return super().gathered_view()


class FusedInterNodeAllGatherGemm(FusedAllGatherGemm, InterNodeAllGatherGemm):
    """AG + GEMM by FusedAllGatherGemm's kernel, launched again for each chunk of a far node."""

    def _multiply(self, operands: GatherOperands) -> None:
        operands = launch.readable(self._plan, operands)  # once for all launches
        topology, turns, chunks = self._domain.topology, self._plan.send_recvs, self._call.chunks
        super()._multiply(replace(operands, leaves=True))
        for turn, exchanged in enumerate(turns):
            self._exchanges.go_ahead(chunks + turn, chunks * topology.nodes)
            self._exchanges.bring(turn + 1)
            node = topology.ranks_of(exchanged.received.source // topology.local)
            self._call.wait_chunk(node[0], exchanged.received.chunk, len(node))
            super()._multiply(operands if exchanged is turns[-1] else self._count_and_leave(operands))


class InterNodeAllToAllGemm(_SendsOperand, ChunkedAllToAllGemm):
    """A2A + GEMM by the library. Far ranks' blocks cross the network while the own node's are multiplied."""

    _plan: InterNodePlan
    _call: NodeCall

    def _send(self, transfers: Transfers) -> None:
        ChunkedAllToAllGemm._send(self, transfers)

    def _part(self, exchanged: SendRecv) -> torch.Tensor:
        return self._sent[exchanged.sent.block].chunk(self._call.chunks)[exchanged.sent.chunk]

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
        self._exchanges.go_ahead(sum(map(len, sums)) + 1, 2 * call.chunks)
        for chunks in in_turn:
            self._exchanges.bring(chunks[-1] + 1)
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
                self._exchanges.go_ahead(done, topology.world)
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
            self._exchanges.go_ahead(done * call.chunks + chunk * len(blocks), self._domain.world_size * call.chunks)
            self._exchanges.bring(brought + chunk + 1)
            for block in blocks:
                call.wait_chunk(block, chunk)
            add_product_in_fp32(rows, _joined([call.chunk_of(block, chunk) for block in blocks], 1), b)

    def received_view(self) -> torch.Tensor:
        self._exchanges.finish()
        return super().received_view()


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class FusedInterNodeAllToAllGemm(FusedAllToAllGemm, InterNodeAllToAllGemm):
    """A2A + GEMM by FusedAllToAllGemm's kernel, launched for each chunk, of which every tile needs all ranks' blocks."""

    def _multiply(self, operands: GatherOperands) -> None:
        operands, chunks = launch.readable(self._plan, operands), self._call.chunks
        for chunk in range(chunks):
            self._exchanges.bring_chunk(chunk)
            self._call.wait_chunk(0, chunk, self._domain.world_size)
            super()._multiply(operands if chunk == chunks - 1 else self._count_and_leave(operands))


class InterNodeGemmReduceScatter(ChunkedGemmReduceScatter):
    """GEMM + RS by the library. The blocks of a far node go to its ranks' rail peers in this node, each of which adds them up and
    sends the sum, while later products run."""

    _plan: InterNodePlan
    _call: NodeCall

    def _start(self) -> None:
        engine, plan = self._open(), self._plan
        with engine.products(plan.sm_margin):
            self._exchanges.enqueue(self._domain.topology, self._multiply_chunk, self._sum_for)

    def _multiply_chunk(self, block: int, chunk: int) -> None:
        """The partial sum for a chunk of the rows of rank `block`, which is pushed if another rank of this node adds it up."""
        part = self._chunk(self._partials, block, chunk)
        torch.mm(self._chunk(self._rows, block, chunk), self._b, out=part)
        inside = self._plan.transfers.inside
        if (place := inside.places.get((block, chunk))) is not None:
            self._engine.push(self._partials, [self._call.routes(inside)[place]])

    def _open(self) -> InterNodeEngine:
        """The call, memory for what is multiplied and added, and its exchanges, of which none has begun."""
        domain, plan, world = self._domain, self._plan, self._domain.world_size
        self._engine = engine = engine_of(domain)
        self._rows = self._a.unflatten(0, (world, -1))
        self._partials = self._a.new_empty(world, self._a.shape[0] // world, self._b.shape[1])
        far = domain.topology.nodes - 1 if domain.topology.local > 1 else 0  # a node of one rank sends its partials
        self._sums = self._partials.new_empty(far, *self._partials.shape[1:])
        call = domain.workspace.open(self._partials.shape[1:], self._a.dtype, self._tag, plan.chunks)
        assert isinstance(call, NodeCall)
        self._call = call
        call.next_epoch()
        self._exchanges = ResultExchanges(engine, call, plan)
        return engine

    def _chunk(self, blocks: torch.Tensor, block: int, chunk: int) -> torch.Tensor:
        return blocks[block].chunk(self._call.chunks)[chunk]

    def _sum_for(self, transfer: Transfer) -> Sent:
        """Memory for what the ranks of this node have for the rail peer's chunk that leaves, and what adds it up there."""
        topology = self._domain.topology
        if topology.local == 1:
            total = self._chunk(self._partials, transfer.block, transfer.chunk)
        else:  # a block for each far node, the following one first
            far = (transfer.block // topology.local - topology.node) % topology.nodes - 1
            total = self._chunk(self._sums, far, transfer.chunk)
        return total, partial(self._make_sum, transfer.block, transfer.chunk, total)

    def _make_sum(self, peer: int, chunk: int, total: torch.Tensor) -> None:
        """total = what the ranks of this node have for a chunk of a rail peer: the own one, then the others in rank order."""
        others = self._others(peer)
        if not others:
            return  # a node of one rank: `total` is the own one
        self._wait_for_node(peer, chunk)
        received = self._call.blocks[:, self._call.chunk_rows(chunk)]
        own = self._chunk(self._partials, peer, chunk)
        self._engine.add(self._call, own, received, others, total, self._plan.reduce_sms)

    def _wait_for_node(self, peer: int, chunk: int) -> None:
        """Wait until this node's other ranks have put here what they have for a chunk of a rail peer.

        They are the ranks before and after `peer` in its node: one wait each. Its own block is not theirs, and comes last of all:
        who waited for it here would wait for a sum that needs this one.
        """
        node = self._domain.topology.ranks_of(peer // self._domain.topology.local)
        for ranks in (range(node.start, peer), range(peer + 1, node.stop)):
            if ranks:
                self._call.wait_chunk(ranks.start, chunk, len(ranks))

    def _others(self, peer: int) -> list[int]:
        """The blocks in which this node's other ranks put what they have for a rail peer."""
        topology = self._domain.topology
        return [block for block in topology.ranks_of(peer // topology.local) if block != peer]

    def finish(self) -> torch.Tensor:
        """The sum y [M/W, N]: the own node's partials first, then the sums of the other nodes, in order of nodes."""
        topology, call = self._domain.topology, self._call
        self._exchanges.finish()
        near, node = self._others(topology.rank), topology.ranks_of(topology.node)
        if near:
            call.wait(node.start, len(node))
        peers = [topology.rail_peer(far) for far in range(topology.nodes) if far != topology.node]
        for block in peers:
            call.wait(block)
        own = self._partials[topology.rank]
        y = torch.empty_like(own)
        self._engine.add(call, own, call.blocks, near + peers, y)
        return y


class FusedInterNodeGemmReduceScatter(InterNodeGemmReduceScatter):
    """GEMM + RS by the kernel. A sum of the node waits for its own tiles, too; nobody waits in the kernel."""

    def _start(self) -> None:
        self._a = launch.operand(self._plan, self._a)
        engine, call, plan = self._open(), self._call, self._plan
        # What an earlier call of the operator still sends and receives is enqueued after the kernel: with one hardware queue the
        # kernel would come after its waits for the network. Nothing is lost by sending it after this, because between the calls
        # the caller's stream has no product.
        engine.send_after_this()
        own = self._partials[self._domain.rank]
        self._tiles = _launch(self, engine, ScatterOperands(self._a, self._b, self._partials, own))
        for _, transfers in plan.transfers.by_block:
            for transfer in transfers.network:
                self._exchanges.send(*self._sum_for(transfer))
            engine.push_counted(self._partials, call.routes(transfers.inside, self._tiles))

    def _make_sum(self, peer: int, chunk: int, total: torch.Tensor) -> None:
        self._engine.wait_for_tiles(self._call.stored_tiles(peer, chunk), self._tiles)
        super()._make_sum(peer, chunk, total)


class InterNodeGemmAllToAll(ChunkedGemmAllToAll):
    """GEMM + A2A by the library. The columns of far ranks are multiplied first, and cross the network while the own node's
    are."""

    _plan: InterNodePlan
    _call: NodeCall

    def _start(self) -> None:
        engine, self._staging = self._begin()
        self._columns = self._b.chunk(self._domain.world_size, dim=1)
        with engine.products(self._plan.sm_margin):
            self._exchanges.enqueue(self._domain.topology, self._multiply_chunk, self._sent)

    def _multiply_chunk(self, block: int, chunk: int) -> None:
        """A chunk of the columns of rank `block`, which is pushed if that is another rank of this node."""
        chunks, inside = self._call.chunks, self._plan.transfers.inside
        into = self._own_place() if block == self._domain.rank else self._staging[block]
        torch.mm(self._a.chunk(chunks)[chunk], self._columns[block], out=into.chunk(chunks)[chunk])
        if (place := inside.places.get((block, chunk))) is not None:
            self._engine.push(self._staging, [self._call.routes(inside)[place]])

    def _sent(self, transfer: Transfer) -> Sent:
        """A chunk of the columns for another node. Its product has filled it."""
        return self._staging[transfer.block].chunk(self._call.chunks)[transfer.chunk], None

    def _begin(self) -> tuple[InterNodeEngine, torch.Tensor]:
        """The call and its exchanges, of which none has begun; the engine, and memory [W, M/W, N/W] for what is multiplied."""
        domain, plan = self._domain, self._plan
        self._engine = engine = engine_of(domain)
        staging = new_blocks(domain, self._a, self._b)
        call = domain.workspace.open(staging.shape[1:], staging.dtype, self._tag, plan.chunks)
        assert isinstance(call, NodeCall)
        self._call = call
        call.next_epoch()
        self._exchanges = ResultExchanges(engine, call, plan)
        return engine, staging

    def received(self) -> torch.Tensor:
        self._exchanges.finish()
        return super().received()


class FusedInterNodeGemmAllToAll(FusedGemmAllToAll, InterNodeGemmAllToAll):
    """GEMM + A2A by the kernel. Each chunk leaves when its tiles are counted."""

    def _start(self) -> None:
        self._a = launch.operand(self._plan, self._a)
        engine, self._staging = self._begin()
        engine.send_after_this()  # as in FusedInterNodeGemmReduceScatter
        self._tiles = _launch(self, engine, self._operands(self._staging))
        for exchanged in self._plan.send_recvs:
            self._exchanges.send(*self._sent(exchanged.sent))
        engine.push_counted(self._staging, self._call.routes(self._plan.transfers.inside, self._tiles))

    def _sent(self, transfer: Transfer) -> Sent:
        part, _ = super()._sent(transfer)
        return part, partial(
            self._engine.wait_for_tiles, self._call.stored_tiles(transfer.block, transfer.chunk), self._tiles
        )


def _launch(
    operator: FusedInterNodeGemmReduceScatter | FusedInterNodeGemmAllToAll, engine: InterNodeEngine,
    operands: ScatterOperands,
) -> int:  # fmt: skip
    """Launch the kernel that writes `operands.staging`; the tiles that it counts of a chunk."""
    domain, call, plan = operator._domain, operator._call, operator._plan
    assert operands.staging is not None and isinstance(call, NodeCall)
    engine.launch(lambda: launch.multiply_and_send(domain, call, plan, operands), operands.staging, [])
    return launch.tiles_of_chunk(plan, operands.y)
