"""What one rank does in a pass, as its plan says: the engines of operators/ in the simulator's words.

The legs are the plan's, the order of tiles is the schedule's (planning/schedule/order.py). Here is only how long each
thing takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from ....methods import TRAITS
from ....planning import cost
from ....planning.low_latency import LOW_LATENCY
from ....planning.machines import System
from ....planning.schedule.kinds import GATHER, INBOUND, SCATTER
from ....planning.schedule.legs import NETWORK, Leg
from ....planning.schedule.order import multiplied_together, targets
from ....planning.schedule.turns import leaving
from .across_nodes import far_arrivals, far_turns, in_order, lane_of, made, multiplied, node_sums, waits_for
from .copies import copied, give, put_together, take
from .persistent_tiles import gather_tiles, receive_tiles, scatter_tiles
from .timeline import COMMUNICATION, COMPUTE, GEMM, WAITING, Kernel, Program, Send, Tile, Token, arrived
from .work import BF16, FP32, STARTED, Work

BARRIER_US = 10.0  # what a barrier of signals takes (docs/design.md)
# Host work in driver calls: a kernel launch with its preparation, a library product, a collective, what each call has besides.
LAUNCH_CALLS, PRODUCT_CALLS, COLLECTIVE_CALLS, OTHER_CALLS = 2, 5, 9, 4
PUSH_CALLS, PUSH_AFTER_TILES_CALLS, NETWORK_CALLS = 2, 3, COLLECTIVE_CALLS + 2  # send and receive are one call of NCCL

Part = tuple[list[Kernel], list[Send]]


def gather_part(work: Work) -> Part:
    """AG + GEMM, all of it."""
    method = work.plan.method
    if work.world == 1:
        return [_product(work, work.gemm_us)], []
    if method == "collective":
        gather = Kernel("nccl all-gather", COMMUNICATION, work.collective_us, work.system.gap_us)
        return [gather, _product(work, work.gemm_us)], []
    if method == LOW_LATENCY:
        return [_low_latency(work, "low_latency_gather_kernel"), _product(work, work.gemm_us)], []
    if method == "chunked":
        return _chunked_gather(work), sends(work)
    return _launches(work, _persistent(work, "all_gather_gemm_kernel", gather_tiles(work))), sends(work)


def scatter_part(work: Work) -> tuple[Part, list[Kernel]]:
    """GEMM + RS: what starts it, and what finishes it."""
    method, system = work.plan.method, work.system
    if work.world == 1:
        return ([_product(work, work.gemm_us)], []), []
    if method == "collective":
        reduce = Kernel("nccl reduce-scatter", COMMUNICATION, work.collective_us, system.gap_us)
        return ([_product(work, work.gemm_us)], []), [reduce]
    if method == LOW_LATENCY:
        return ([_product(work, work.gemm_us)], []), [_low_latency(work, "low_latency_scatter_kernel")]
    adds = Kernel("reduce_partials_kernel", COMPUTE, _reduce_us(work), system.gap_us)
    waits = wait(work, work.all_arrivals())
    if method == "chunked":
        return ([*_products(work), *node_sums(work)], sends(work)), [waits, adds]
    kernel = _persistent(work, "gemm_reduce_scatter_kernel", scatter_tiles(work))
    finish = [waits, adds] if work.plan.reduces_later else []
    return ([kernel, *node_sums(work)], [] if method == "direct" else sends(work)), finish


def receive_part(work: Work) -> Part:
    """A2A + GEMM, all of it."""
    method, gap = work.plan.method, work.system.gap_us
    if work.plan.method == "collective":
        exchange = Kernel("nccl all-to-all", COMMUNICATION, work.collective_us, gap)
        return [exchange, put_together(work), _product(work, work.gemm_us)], []
    if method == "chunked":
        return [*_received(work)], sends(work)
    return _launches(work, _persistent(work, "all_to_all_gemm_kernel", receive_tiles(work))), sends(work)


def exchange_part(work: Work) -> tuple[Part, list[Kernel]]:
    """GEMM + A2A: what starts it, and what takes the blocks out of symmetric memory."""
    method = work.plan.method
    if method == "collective":
        exchange = Kernel("nccl all-to-all", COMMUNICATION, work.collective_us, work.system.gap_us)
        return ([_product(work, work.gemm_us), put_together(work)], []), [exchange, *take(work)]
    finish = [wait(work, work.all_arrivals()), *take(work)]
    if method == "chunked":
        return (_products(work), sends(work)), finish
    kernel = _persistent(work, "gemm_reduce_scatter_kernel", scatter_tiles(work))
    return ([kernel], [] if method == "direct" else sends(work)), finish


def _low_latency(work: Work, name: str) -> Kernel:
    us = cost.low_latency_us(work.system, (work.world - 1) * work.shard_bytes)
    return Kernel(name, COMMUNICATION, us, work.system.gap_us)


def sends_by_copies(work: Work) -> bool:
    return work.world > 1 and TRAITS[work.plan.method].pushes


def sends(work: Work) -> list[Send]:
    """The plan's legs, in its order, by the copy engine, the network, or (direct) by stores of the kernel."""
    nbytes = work.shard_bytes / work.plan.chunks
    if work.plan.method == "direct":
        return [Send(work.call, leg, nbytes, work.system.store_gbs, 0.0, work.started) for leg in work.plan.legs]
    return [_send(work, leg, nbytes) for leg in in_order(work)]


def _send(work: Work, leg: Leg, nbytes: float) -> Send:
    system = work.system
    gbs, us = (system.nic_gbs, system.nic_us) if leg.link == NETWORK else (system.copy_gbs, system.push_us)
    return Send(work.call, leg, nbytes, gbs, us, waits_for(work, leg) or _ready(work, leg), lane_of(leg))


def _ready(work: Work, leg: Leg) -> Token:
    """The Token after which an own operand may leave."""
    if work.plan.kind in INBOUND:
        return work.begun
    return made(work, leg.block, leg.chunk if work.topology.nodes > 1 or leg.after_tiles else 0)


def program(work: Work) -> Program:
    """A pass alone, as the benchmark measures it."""
    kernels, sending = forward(work)
    return assemble(work, [*leading_barrier(work), *kernels], sending)


def forward(work: Work) -> Part:
    """A pass, once its operator has begun."""
    start = epoch(work, sends_by_copies(work))
    if work.plan.kind in INBOUND:
        kernels, sending = (gather_part if work.plan.kind == GATHER else receive_part)(work)
        return [*give(work), *start, *kernels], sending
    (kernels, sending), finish = (scatter_part if work.plan.kind == SCATTER else exchange_part)(work)
    return [*start, *kernels, *finish], sending


def assemble(work: Work, kernels: list[Kernel], sending: list[Send]) -> Program:
    system = work.system
    return Program(
        work.topology.rank, work.world, tuple(kernels), tuple(sending),
        host_us(system, kernels, sending), store_gbs=system.tile_store_gbs, nodes=work.topology.nodes,
    )  # fmt: skip


def host_us(system: System, kernels: Sequence[Kernel], sending: Sequence[Send], operators: int = 1) -> float:
    """Microseconds of host time until a call returns: driver calls for kernels and pushes, and what each operator has besides."""
    calls = sum(map(_push_calls, sending)) + sum(map(_calls, kernels))
    return system.host_call_us * (OTHER_CALLS * operators + calls)


def _push_calls(send: Send) -> int:
    if send.ready is not None and send.ready[0] == STARTED:  # the kernel stores
        return 0
    if send.leg.link == NETWORK:
        return NETWORK_CALLS
    return PUSH_AFTER_TILES_CALLS if send.leg.after_tiles else PUSH_CALLS


def _calls(kernel: Kernel) -> int:
    if kernel.kind == COMMUNICATION and kernel.name.startswith("nccl"):
        return COLLECTIVE_CALLS
    return PRODUCT_CALLS if kernel.kind == GEMM and not kernel.tiles else LAUNCH_CALLS


def leading_barrier(work: Work) -> list[Kernel]:
    """The barrier with which an operator begins, by its plan."""
    if not work.plan.variant.barrier_first or work.world == 1:
        return []
    return [barrier(work.system, work.topology.nodes)]


def barrier(system: System, nodes: int = 1) -> Kernel:
    """In which the ranks of a group that spans so many nodes meet: twins first."""
    return Kernel("barrier_kernel", WAITING, BARRIER_US + (system.nic_us if nodes > 1 else 0.0), system.gap_us)


def epoch(work: Work, pushes: bool) -> Iterator[Kernel]:
    """The kernel that advances the epoch, where copies send it. pushes: whether there are copies."""
    if pushes:
        yield Kernel("next_epoch_kernel", COMPUTE, work.system.wait_us, work.system.gap_us, ends=work.begun)


def _product(work: Work, us: float, ends: Token | None = None) -> Kernel:
    return Kernel("library gemm", GEMM, us, work.system.gap_us, ends=ends)


def wait(work: Work, tokens: tuple[Token, ...]) -> Kernel:
    return Kernel("wait_kernel", WAITING, work.system.wait_us, work.system.gap_us, needs=tokens)


def _chunked_gather(work: Work) -> list[Kernel]:
    """Blocks of the own node whole, those of far nodes by the chunks in which they cross the network."""
    chunks, whole, part = range(work.plan.chunks), work.part_us, work.chunk_us(work.plan.chunks)
    kernels = [_product(work, whole)]
    for source in work.plan.sources[: work.topology.local - 1]:
        kernels += [wait(work, tuple(arrived(work.call, source, c) for c in chunks)), _product(work, whole)]
    for unit in chain.from_iterable(far_turns(work)):
        kernels += [wait(work, (arrived(work.call, *unit),)), _product(work, part)]
    return kernels


def _received(work: Work) -> Iterator[Kernel]:
    """A2A + GEMM: block by block; across nodes several at once, side by side, of far nodes each chunk of the last one as it comes.
    Then their sum in fp32 is copied into the result."""
    chunks, own = range(work.plan.chunks), work.topology.rank
    for blocks in multiplied_together(work.topology, work.plan.together):
        is_far = blocks[0] not in work.topology.ranks_of(work.topology.node)
        if len(blocks) > 1:
            yield _side_by_side(work, len(blocks))
        for turn in [(chunk,) for chunk in chunks] if is_far else [tuple(chunks)]:
            for block in blocks:
                if block != own:
                    yield wait(work, tuple(arrived(work.call, block, chunk) for chunk in turn))
            yield _product(work, work.terms_us(len(blocks), work.plan.chunks if is_far else 1, own in blocks))
    yield copied(work, (FP32 + BF16) * work.m_shard * work.pass_.n, "copy of the sum")


def _side_by_side(work: Work, blocks: int) -> Kernel:
    """The copy of so many blocks, and of their rows of the weight: read and written."""
    terms = blocks * work.pass_.k // work.world * (work.m_shard + work.pass_.n) * work.pass_.dtype.itemsize
    return copied(work, 2 * terms)


def _products(work: Work) -> list[Kernel]:
    """One for each block, the own one last; across nodes one for each chunk, between their exchanges (schedule/turns.py)."""
    if work.topology.nodes == 1:
        blocks = (*targets(work.topology), work.topology.rank)
        return [_product(work, work.part_us, multiplied(work, block)) for block in blocks]
    turns, us = leaving(work.plan.kind, work.topology, work.plan.chunks), work.chunk_us(work.plan.chunks)
    return [_product(work, us, multiplied(work, *unit)) for _, units in turns for unit in units]


def _reduce_us(work: Work) -> float:
    """The partials of the node's ranks and the sums of other nodes are read, the total is written."""
    return cost.sum_us(work.system, (work.topology.local + work.topology.nodes) * work.shard_bytes)


def _launches(work: Work, kernel: Kernel) -> list[Kernel]:
    """The launches of a kernel that multiplies what arrives: one, or across nodes one behind each wait for something from far."""
    if work.topology.nodes == 1:
        return [kernel]
    takes_some = replace(kernel, leaves=True)
    counts = Kernel("count_arrivals_kernel", COMPUTE, work.system.wait_us, work.system.gap_us)
    kernels = [takes_some] if work.plan.kind == GATHER else []
    *turns, last = far_arrivals(work)
    for arrivals in turns:
        kernels += [wait(work, arrivals), counts, takes_some]
    return [*kernels, wait(work, last), kernel]


def _persistent(work: Work, name: str, tiles: tuple[Tile, ...]) -> Kernel:
    us, gap = work.system.ramp_us, work.system.gap_us
    return Kernel(name, GEMM, us, gap, tiles=tiles, sms=work.kernel_sms, starts=work.started)
