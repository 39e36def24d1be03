"""What one rank does in a pass, as its plan says: the engines of operators/ in the simulator's words.

The legs are the plan's, the order of tiles is the schedule's (schedule.py). Here is only how long each thing takes.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..methods import TRAITS
from . import cost
from .low_latency import LOW_LATENCY
from .machines import System
from .persistent_tiles import gather_tiles, receive_tiles, scatter_tiles
from .schedule import GATHER, INBOUND, SCATTER
from .timeline import COMMUNICATION, COMPUTE, GEMM, WAITING, Kernel, Program, Send, Tile, Token, arrived, stored
from .work import Work

BARRIER_US = 10.0  # what a barrier of signals takes (docs/design.md)
STARTED = ("started",)  # the kernel that stores at peers
BEGUN = ("begun",)  # what comes before a call's first product or push
# Host work in driver calls: a kernel launch with its preparation, a library product, a collective, what each call has besides.
LAUNCH_CALLS, PRODUCT_CALLS, COLLECTIVE_CALLS, OTHER_CALLS = 2, 5, 9, 4

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
    return [_persistent(work, "all_gather_gemm_kernel", gather_tiles(work))], sends(work)


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
        rows = [*(target for target, _ in work.plan.legs.by_target), work.topology.rank]
        products = [_product(work, work.part_us, ends=(work.call, "rows", row)) for row in rows]
        return (products, sends(work)), [waits, adds]
    kernel = _persistent(work, "gemm_reduce_scatter_kernel", scatter_tiles(work))
    finish = [waits, adds] if work.plan.variant.split_reduction else []
    return ([kernel], [] if method == "direct" else sends(work)), finish


def receive_part(work: Work) -> Part:
    """A2A + GEMM, all of it."""
    method, gap = work.plan.method, work.system.gap_us
    if work.plan.method == "collective":
        exchange = Kernel("nccl all-to-all", COMMUNICATION, work.collective_us, gap)
        return [exchange, _copy(work, work.world), _product(work, work.gemm_us)], []
    if method == "chunked":
        return _chunked_gather(work), sends(work)
    return [_persistent(work, "all_to_all_gemm_kernel", receive_tiles(work))], sends(work)


def exchange_part(work: Work) -> tuple[Part, list[Kernel]]:
    """GEMM + A2A: what starts it, and what takes the blocks out of symmetric memory."""
    method, parts = work.plan.method, [work.part_us] * work.world
    if method == "collective":
        exchange = Kernel("nccl all-to-all", COMMUNICATION, work.collective_us, work.system.gap_us)
        return ([_product(work, us) for us in parts], []), [exchange]
    finish = [wait(work, work.all_arrivals()), _copy(work, work.world - 1)]  # the own block is in its place
    if method == "chunked":
        blocks = [*(target for target, _ in work.plan.legs.by_target), work.topology.rank]
        products = [_product(work, us, (work.call, "rows", d)) for us, d in zip(parts, blocks, strict=True)]
        return (products, sends(work)), finish
    kernel = _persistent(work, "gemm_reduce_scatter_kernel", scatter_tiles(work))
    return ([kernel], [] if method == "direct" else sends(work)), finish


def _low_latency(work: Work, name: str) -> Kernel:
    us = cost.low_latency_us(work.system, (work.world - 1) * work.shard_bytes)
    return Kernel(name, COMMUNICATION, us, work.system.gap_us)


def _copy(work: Work, blocks: int) -> Kernel:
    """The copy that puts blocks where they belong: read and written."""
    us = cost.sum_us(work.system, 2 * blocks * work.shard_bytes)
    return Kernel("copy of the blocks", COMPUTE, us, work.system.gap_us)


def sends_by_copies(work: Work) -> bool:
    return work.world > 1 and TRAITS[work.plan.method].pushes


def sends(work: Work) -> list[Send]:
    """The plan's legs, in its order, by the copy engine or (direct) by stores of the kernel."""
    system, nbytes = work.system, work.shard_bytes / work.plan.chunks
    if work.plan.method == "direct":
        return [Send(work.call, leg, nbytes, system.store_gbs, 0.0, STARTED) for leg in work.plan.legs]
    return [
        Send(work.call, leg, nbytes, system.copy_gbs, system.push_us, _ready(work, leg.block, leg.chunk))
        for leg in work.plan.legs
    ]


def _ready(work: Work, block: int, chunk: int) -> Token:
    if work.plan.kind in INBOUND:
        return BEGUN
    return stored(work.call, block, chunk) if work.plan.method == "fused" else (work.call, "rows", block)


def program(work: Work) -> Program:
    """A pass alone, as the benchmark measures it."""
    start = list(begin(work, sends_by_copies(work)))
    if work.plan.kind in INBOUND:
        kernels, sending = (gather_part if work.plan.kind == GATHER else receive_part)(work)
        return assemble(work, [*start, *kernels], sending)
    (kernels, sending), finish = (scatter_part if work.plan.kind == SCATTER else exchange_part)(work)
    return assemble(work, [*start, *kernels, *finish], sending)


def assemble(work: Work, kernels: list[Kernel], sending: list[Send]) -> Program:
    system = work.system
    return Program(
        work.topology.rank, work.world, system.sms, tuple(kernels), tuple(sending),
        host_us(system, kernels, sending), store_gbs=system.tile_store_gbs,
    )  # fmt: skip


def host_us(system: System, kernels: list[Kernel], sending: list[Send]) -> float:
    """Until a call returns: driver calls for kernels and pushes, and what is always there."""
    pushes = sum(3 if send.ready != BEGUN and send.leg.after_tiles else 2 for send in sending if send.ready != STARTED)
    return system.host_call_us * (OTHER_CALLS + pushes + sum(map(_calls, kernels)))


def _calls(kernel: Kernel) -> int:
    if kernel.kind == COMMUNICATION and kernel.name.startswith("nccl"):
        return COLLECTIVE_CALLS
    return PRODUCT_CALLS if kernel.kind == GEMM and not kernel.tiles else LAUNCH_CALLS


def begin(work: Work, pushes: bool) -> Iterator[Kernel]:
    """What goes before: a barrier, and the epoch where copies send it. pushes: whether there are copies."""
    if work.plan.variant.barrier_first and work.world > 1:
        yield Kernel("barrier_kernel", WAITING, BARRIER_US, work.system.gap_us)
    if pushes:
        yield Kernel("next_epoch_kernel", COMPUTE, work.system.wait_us, work.system.gap_us, ends=BEGUN)


def _product(work: Work, us: float, ends: Token | None = None) -> Kernel:
    return Kernel("library gemm", GEMM, us, work.system.gap_us, ends=ends)


def wait(work: Work, tokens: tuple[Token, ...]) -> Kernel:
    return Kernel("wait_kernel", WAITING, work.system.wait_us, work.system.gap_us, needs=tokens)


def _chunked_gather(work: Work) -> list[Kernel]:
    kernels = [_product(work, work.part_us)]
    for source in work.plan.sources:
        kernels += [wait(work, (arrived(work.call, source, 0),)), _product(work, work.part_us)]
    return kernels


def _reduce_us(work: Work) -> float:
    """Every rank's partials are read, the sum is written."""
    return cost.sum_us(work.system, (work.world + 1) * work.shard_bytes)


def _persistent(work: Work, name: str, tiles: tuple[Tile, ...]) -> Kernel:
    return Kernel(name, GEMM, work.system.ramp_us, work.system.gap_us, tiles=tiles, starts=STARTED)
