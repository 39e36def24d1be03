"""The operators of groups that span nodes: some chunks are multiplied while the next ones are on the network.

    `chunked`   by the library: an operand's chunks are multiplied as they come, a result's leave after their products. The own
                node's products hide what crosses
    `fused`     by one persistent kernel, launched again for what has come: for the own node's rows, then for each chunk of a far
                node (AG + GEMM); for each chunk (A2A + GEMM). Of a result it runs once, and each chunk leaves when its tiles are
                counted

All ranks enqueue the same steps in the same order (schedule/inter_node.py), so that rail peers start their exchanges alike, and
whatever a step waits for was enqueued, everywhere, in it or before. No product's kernel waits for the network
(kernels/arrivals.py). What runs beside a kernel finds room on the SMs that it leaves (EnginePlan.sm_margin). Nothing that waits
for the kernel's tiles stands before it in a hardware queue.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..gpu.launch import Launch
from ..group.domain import OverlapDomain
from ..group.signals import Tag
from ..ops import launch
from ..ops.a2a_gemm import ChunkedAllToAllGemm, FusedAllToAllGemm, add_product_in_fp32, product_in_fp32
from ..ops.ag_gemm import ChunkedAllGatherGemm, FusedAllGatherGemm
from ..ops.gemm_a2a import ChunkedGemmAllToAll, FusedGemmAllToAll, new_blocks
from ..ops.gemm_rs import ChunkedGemmReduceScatter
from ..schedule.kinds import Kind
from ..schedule.order import Transfer
from .engines import InterNodeEngine
from .exchanges import Exchanges, Sent
from .plan import InterNodePlan
from .slots import NodeCall


def engine_of(domain: OverlapDomain) -> InterNodeEngine:
    assert isinstance(domain.engine, InterNodeEngine)
    return domain.engine


class _SendsOperand:
    """What AG + GEMM and A2A + GEMM have in common: the first exchange starts, then what stays in the node."""

    _domain: OverlapDomain
    _plan: InterNodePlan
    _call: NodeCall

    def _send_blocks(self, blocks: torch.Tensor) -> None:
        """blocks: block d for rank d; of AG + GEMM one for all."""
        engine, call, plan = engine_of(self._domain), self._call, self._plan
        call.next_epoch()
        parts = (blocks[one.sent.block].chunk(call.chunks)[one.sent.chunk] for one in plan.send_recvs)
        self._engine, self._exchanges = engine, Exchanges(engine, call, plan, parts)
        self._exchanges.start()
        engine.push(blocks, call.routes(plan.transfers.inside, pitch=blocks.stride(0)))

    def _count(self) -> None:
        """Count what is here, for a launch that multiplies this and leaves."""
        call, kind = self._call, self._plan.kind
        call.launches.run(("count", kind), (), _count_launch, self._domain, call, kind)

    def _multiply_in_launches(
        self, own: torch.Tensor, b_kn: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Callable[[bool], None]:
        """What launches the kernel once, for what is counted; told whether to leave then."""
        own = launch.readable(self._plan, own)  # once for all launches
        return partial(launch.receive_and_multiply, self._domain, self._call, self._plan, own, b_kn, y, bias)


def _count_launch(domain: OverlapDomain, call: NodeCall, kind: Kind) -> Launch:
    from ..kernels.arrivals import count_arrivals_kernel

    slot, constants = call.slot, dict(WORLD=domain.world_size, LOCAL=domain.topology.local, CHUNKS=call.chunks)
    arguments = dict(here_ptr=slot.counters.here, signals_ptr=slot.signals, epoch_ptr=slot.epoch, rank=domain.rank)
    return Launch(count_arrivals_kernel, (1,), arguments, constants | dict(EXCHANGE=kind.sums_blocks, num_warps=1))


class InterNodeAllGatherGemm(_SendsOperand, ChunkedAllGatherGemm):
    """AG + GEMM by the library. Each chunk that arrives from a far node is passed on inside this one."""

    _plan: InterNodePlan
    _call: NodeCall

    def _push(self) -> None:
        self._send_blocks(self._own[None])

    def matmul(self, b_kn: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply blocks of the own node whole, and those of each far node chunk by chunk, in the order in which they come."""
        world = self._domain.world_size
        y = self._own.new_empty(self._own.shape[0] * world, b_kn.shape[1])
        with self._engine.products(self._plan.send_sms):
            self._multiply_blocks(b_kn, y.unflatten(0, (world, -1)), bias)
        self._arrived = True
        return y

    def _multiply_blocks(self, b_kn: torch.Tensor, blocks: torch.Tensor, bias: torch.Tensor | None) -> None:
        call, topology, world = self._call, self._domain.topology, self._domain.world_size
        multiply = torch.mm if bias is None else partial(torch.addmm, bias)
        multiply(self._own, b_kn, out=blocks[self._domain.rank])
        for done, source in enumerate(self._plan.sources[: topology.local - 1], start=1):
            self._exchanges.go_ahead(done, world)
            call.wait(source)
            multiply(call.blocks[source], b_kn, out=blocks[source])
        for turn in range((topology.nodes - 1) * call.chunks):
            self._exchanges.go_ahead(call.chunks + turn, call.chunks * topology.nodes)
            self._exchanges.bring(turn + 1)
            node, chunk = divmod(turn, call.chunks)
            rows, first = call.chunk_rows(chunk), (node + 1) * topology.local - 1
            for source in self._plan.sources[first : first + topology.local]:
                call.wait_chunk(source, chunk)
                multiply(call.blocks[source][rows], b_kn, out=blocks[source][rows])

    def gathered_view(self) -> torch.Tensor:
        self._exchanges.finish()
        return super().gathered_view()


class FusedInterNodeAllGatherGemm(FusedAllGatherGemm, InterNodeAllGatherGemm):
    """AG + GEMM by FusedAllGatherGemm's kernel, launched again for each chunk of a far node."""

    def _multiply(self, b_kn: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None) -> None:
        multiply = self._multiply_in_launches(self._own, b_kn, y, bias)
        topology, turns, chunks = self._domain.topology, self._plan.send_recvs, self._call.chunks
        multiply(True)
        for turn, exchanged in enumerate(turns):
            self._exchanges.go_ahead(chunks + turn, chunks * topology.nodes)
            self._exchanges.bring(turn + 1)
            node = topology.ranks_of(exchanged.received.source // topology.local)
            self._call.wait_chunk(node[0], exchanged.received.chunk, len(node))
            if exchanged is not turns[-1]:
                self._count()
            multiply(exchanged is not turns[-1])


class InterNodeAllToAllGemm(_SendsOperand, ChunkedAllToAllGemm):
    """A2A + GEMM by the library. Far ranks' blocks cross the network while the own node's are multiplied."""

    _plan: InterNodePlan
    _call: NodeCall

    def _push(self) -> None:
        self._send_blocks(self._sent)

    def matmul(self, b_kn: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with self._engine.products(self._plan.send_sms):
            y.copy_(self._sum_of_blocks(b_kn.chunk(self._domain.world_size, dim=0)))
        self._arrived = True
        return y

    def _sum_of_blocks(self, b_blocks: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The products of all blocks with their rows of b, in fp32, in the order in which they arrive."""
        call, rank, exchanges = self._call, self._domain.rank, self._exchanges
        local, world, chunks = self._domain.topology.local, self._domain.world_size, call.chunks
        total = product_in_fp32(self._sent[rank], b_blocks[rank])
        for done, source in enumerate(self._plan.sources[: local - 1], start=1):
            exchanges.go_ahead(done, world)
            call.wait(source)
            add_product_in_fp32(total, call.blocks[source], b_blocks[source])
        for number, source in enumerate(self._plan.sources[local - 1 :]):
            for chunk, rows in enumerate(total.chunk(chunks)):
                exchanges.go_ahead((local + number) * chunks + chunk, world * chunks)
                exchanges.bring(number * chunks + chunk + 1)
                call.wait_chunk(source, chunk)
                add_product_in_fp32(rows, call.chunk_of(source, chunk), b_blocks[source])
        return total

    def received_view(self) -> torch.Tensor:
        self._exchanges.finish()
        return super().received_view()


class FusedInterNodeAllToAllGemm(FusedAllToAllGemm, InterNodeAllToAllGemm):
    """A2A + GEMM by FusedAllToAllGemm's kernel, launched for each chunk, of which every tile needs all ranks' blocks."""

    def _multiply(self, b_kn: torch.Tensor, y: torch.Tensor) -> None:
        multiply, last = self._multiply_in_launches(self._sent, b_kn, y), self._call.chunks - 1
        for chunk in range(self._call.chunks):
            self._exchanges.bring_chunk(chunk)
            self._call.wait_chunk(0, chunk, self._domain.world_size)
            if chunk < last:
                self._count()
            multiply(chunk < last)


class _SendsResult:
    """What GEMM + RS and GEMM + A2A have in common: each chunk leaves after its product."""

    _domain: OverlapDomain
    _plan: InterNodePlan
    _tag: Tag
    _call: NodeCall

    def _open_with(self, blocks: torch.Tensor) -> None:
        """The call and its exchanges, of which none has begun. blocks: for what is multiplied, block d for rank d."""
        engine, plan = engine_of(self._domain), self._plan
        call = self._domain.workspace.open(blocks.shape[1:], blocks.dtype, self._tag, plan.chunks)
        assert isinstance(call, NodeCall)
        call.next_epoch()
        self._engine, self._call, self._blocks, self._exchanges = engine, call, blocks, Exchanges(engine, call, plan)

    def _sent(self, transfer: Transfer) -> Sent:
        """What crosses the network for a chunk of `_blocks`, and what fills it after its product."""
        raise NotImplementedError

    def _product(self, block: int, chunk: int) -> None:
        """Multiply a chunk of a block by the library."""
        raise NotImplementedError

    def _multiply_in_turns(self) -> None:
        with self._engine.products(self._plan.sm_margin):
            self._exchanges.enqueue(self._domain.topology, self._multiply_chunk, self._sent)

    def _multiply_chunk(self, block: int, chunk: int) -> None:
        self._product(block, chunk)
        if (stays := self._plan.transfers.inside.by_unit.get((block, chunk))) is not None:
            self._engine.push(self._blocks, self._call.routes(stays))

    def _launch(self, a_mk: torch.Tensor, b_kn: torch.Tensor, y: torch.Tensor) -> None:
        """Launch the kernel that fills `_blocks`, and enqueue what leaves, in the order of its tiles."""
        domain, engine, call, plan = self._domain, self._engine, self._call, self._plan
        # What an earlier call of the operator still sends and receives is enqueued after the kernel: with one hardware queue the
        # kernel would come after its waits for the network. Nothing is lost by sending it after this, because between the calls
        # the caller's stream has no product.
        engine.send_after_this()
        blocks = self._blocks
        engine.launch(lambda: launch.multiply_and_send(domain, call, plan, a_mk, b_kn, blocks, y))
        tiles = launch.tiles_of_chunk(plan, y)
        for _, transfers in plan.transfers.by_block:
            for transfer in transfers.network:
                source, make = self._sent(transfer)
                self._exchanges.send(source, partial(self._after_tiles, transfer, tiles, make))
            engine.push_counted(self._blocks, call.routes(transfers.inside, tiles))

    def _after_tiles(self, transfer: Transfer, tiles: int, make: Callable[[], None] | None) -> None:
        self._engine.wait_for_tiles(self._call.stored_tiles(transfer.block, transfer.chunk), tiles)
        if make is not None:
            make()


class InterNodeGemmReduceScatter(_SendsResult, ChunkedGemmReduceScatter):
    """GEMM + RS by the library. The blocks of a far node go to its ranks' rail peers here, which add them up and send the sum."""

    _plan: InterNodePlan
    _call: NodeCall

    def _start(self) -> None:
        self._begin()
        self._multiply_in_turns()

    def _begin(self) -> None:
        world, topology, a = self._domain.world_size, self._domain.topology, self._a
        self._rows = a.unflatten(0, (world, -1))
        self._partials = a.new_empty(world, a.shape[0] // world, self._b.shape[1])
        far = topology.nodes - 1 if topology.local > 1 else 0  # a node of one rank sends its partials
        self._sums = self._partials.new_empty(far, *self._partials.shape[1:])
        self._open_with(self._partials)

    def _product(self, block: int, chunk: int) -> None:
        part = self._chunk(self._partials, block, chunk)
        torch.mm(self._chunk(self._rows, block, chunk), self._b, out=part)

    def _chunk(self, blocks: torch.Tensor, block: int, chunk: int) -> torch.Tensor:
        return blocks[block].chunk(self._call.chunks)[chunk]

    def _sent(self, transfer: Transfer) -> Sent:
        """The sum of what the ranks of this node have for a chunk of a rail peer."""
        topology, block, chunk = self._domain.topology, transfer.block, transfer.chunk
        if topology.local == 1:
            return self._chunk(self._partials, block, chunk), None
        # a sum for each far node, the following one first
        far = (block // topology.local - topology.node) % topology.nodes - 1
        total = self._chunk(self._sums, far, chunk)
        return total, partial(self._make_sum, block, chunk, total)

    def _make_sum(self, peer: int, chunk: int, total: torch.Tensor) -> None:
        """total = what the ranks of this node have for a chunk of a rail peer: the own one, then the others in rank order. The
        others' lie in the blocks of the ranks before and after `peer`: one wait each. That of `peer` itself is a sum that needs
        this one."""
        node = self._domain.topology.ranks_of(peer // self._domain.topology.local)
        for ranks in (range(node.start, peer), range(peer + 1, node.stop)):
            if ranks:
                self._call.wait_chunk(ranks.start, chunk, len(ranks))
        received, own = self._call.blocks[:, self._call.chunk_rows(chunk)], self._chunk(self._partials, peer, chunk)
        self._engine.add(self._call, own, received, self._others(peer), total, self._plan.reduce_sms)

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
        return y if self._bias is None else y.add_(self._bias)


class FusedInterNodeGemmReduceScatter(InterNodeGemmReduceScatter):
    """GEMM + RS by the kernel. A sum of the node waits for its own tiles, too; nobody waits in the kernel."""

    def _start(self) -> None:
        self._begin()
        self._launch(self._a, self._b, self._partials[self._domain.rank])


class InterNodeGemmAllToAll(_SendsResult, ChunkedGemmAllToAll):
    """GEMM + A2A by the library. The columns of far ranks are multiplied first, and cross while the own node's are."""

    _plan: InterNodePlan
    _call: NodeCall

    def _start(self) -> None:
        self._open_with(new_blocks(self._domain, self._a, self._b))
        self._columns = self._b.chunk(self._domain.world_size, dim=1)
        self._multiply_in_turns()

    def _product(self, block: int, chunk: int) -> None:
        into, chunks = self._own_place() if block == self._domain.rank else self._blocks[block], self._call.chunks
        torch.mm(self._a.chunk(chunks)[chunk], self._columns[block], out=into.chunk(chunks)[chunk])

    def _sent(self, transfer: Transfer) -> Sent:
        return self._blocks[transfer.block].chunk(self._call.chunks)[transfer.chunk], None

    def received(self) -> torch.Tensor:
        self._exchanges.finish()
        return super().received()


class FusedInterNodeGemmAllToAll(FusedGemmAllToAll, InterNodeGemmAllToAll):
    """GEMM + A2A by the kernel. Each chunk leaves when its tiles are counted."""

    def _start(self) -> None:
        self._open_with(new_blocks(self._domain, self._a, self._b))
        self._launch(self._a, self._b, self._own_place())
