"""What one rank does in a pass, as its plan says: the engines of operators/ in the simulator's words.

The legs are the plan's, the order of tiles is the schedule's (planning/schedule/order.py). Here is only how long each
thing takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ....planning import cost
from ....planning.machines import System
from ....schedule.order import GATHER, INBOUND, SCATTER
from ....schedule.transfers import NETWORK
from ....select.low_latency import LOW_LATENCY
from .across_nodes import far_arrivals, node_sums
from .by_library import gathered, leaving_products, product, received, wait
from .copies import give, put_together, take
from .enqueued import Exchanges, Item, Part, after_products, in_places
from .persistent_tiles import gather_tiles, receive_tiles, scatter_tiles
from .sending import crossings, inside_node, sends_by_copies
from .timeline import COMMUNICATION, COMPUTE, GEMM, WAITING, Arrival, Kernel, Program, Send, Tile
from .work import STARTED, Work

BARRIER_US = 10.0  # what a barrier of signals takes (docs/design.md)
# Host work in driver calls: a kernel launch with its preparation, a library product, a collective, what each call has besides.
LAUNCH_CALLS, PRODUCT_CALLS, COLLECTIVE_CALLS, OTHER_CALLS = 2, 5, 9, 4
PUSH_CALLS, PUSH_AFTER_TILES_CALLS = 2, 3


def inbound_part(work: Work) -> Part:
    """AG + GEMM, or A2A + GEMM, all of it."""
    method, gathers, multiplies = work.plan.method, work.plan.kind == GATHER, product(work, work.gemm_us)
    if work.world == 1:
        return [multiplies], []
    if method == "collective":
        return [_by_nccl(work), *([] if gathers else [put_together(work)]), multiplies], []
    if method == LOW_LATENCY:
        return [_low_latency(work, "low_latency_gather_kernel"), multiplies], []
    if method == "chunked":
        return [*(gathered if gathers else received)(work)], inside_node(work)
    name, tiles = ("all_gather_gemm_kernel", gather_tiles) if gathers else ("all_to_all_gemm_kernel", receive_tiles)
    return [*_launches(work, _persistent(work, name, tiles(work)))], inside_node(work)


def outbound_part(work: Work, earlier: Exchanges | None = None) -> tuple[Part, list[Item]]:
    """GEMM + RS, or GEMM + A2A: what starts it, and what adds the partial sums or takes the blocks out of symmetric memory.
    earlier: exchanges that come before its own."""
    method, scatters, multiplies = work.plan.method, work.plan.kind == SCATTER, product(work, work.gemm_us)
    if work.world == 1:
        return ([multiplies], []), []
    if method == "collective":
        return ([multiplies, *([] if scatters else [put_together(work)])], []), [_by_nccl(work), *_out_of_slot(work)]
    if method == LOW_LATENCY:
        return ([multiplies], []), [_low_latency(work, "low_latency_scatter_kernel")]
    own, finish = crossings(work), [wait(work, work.all_arrivals()), *_out_of_slot(work)]
    if method == "chunked":
        return (leaving_products(work, node_sums(work), own, earlier), inside_node(work)), [*own.finish(), *finish]
    kernel = _persistent(work, "gemm_reduce_scatter_kernel", scatter_tiles(work))
    items = [kernel, *after_products(node_sums(work), own, earlier)]
    if scatters and not work.plan.reduces_later:
        finish = []  # the kernel has added everything
    return (items, [] if method == "direct" else inside_node(work)), [*own.finish(), *finish]


def _out_of_slot(work: Work) -> list[Kernel]:
    """The sum of the partials, or the pass that takes blocks to the attention. The partials of the node's ranks and the sums of
    other nodes are read, the total is written. NCCL adds by itself."""
    if work.plan.kind != SCATTER:
        return take(work)
    if work.plan.method == "collective":
        return []
    us = cost.sum_us(work.system, (work.topology.local + work.topology.nodes) * work.shard_bytes)
    return [Kernel("reduce_partials_kernel", COMPUTE, us, work.system.gap_us)]


def _by_nccl(work: Work) -> Kernel:
    name = {GATHER: "all-gather", SCATTER: "reduce-scatter"}.get(work.plan.kind, "all-to-all")
    return Kernel(f"nccl {name}", COMMUNICATION, work.collective_us, work.system.gap_us)


def _low_latency(work: Work, name: str) -> Kernel:
    us = cost.low_latency_us(work.system, (work.world - 1) * work.shard_bytes)
    return Kernel(name, COMMUNICATION, us, work.system.gap_us)


def program(work: Work) -> Program:
    """A pass alone, as the benchmark measures it."""
    kernels, sending = forward(work)
    return assemble(work, [*leading_barrier(work), *kernels], sending)


def forward(work: Work) -> Part:
    """A pass, once its operator has begun."""
    start = epoch(work, sends_by_copies(work))
    if work.plan.kind in INBOUND:
        kernels, sending = inbound_part(work)
        return [*give(work), *start, *kernels], sending
    (kernels, sending), finish = outbound_part(work)
    return [*start, *kernels, *finish], sending


def assemble(work: Work, items: Sequence[Item], sent: Sequence[Send]) -> Program:
    """items: in the order in which they are enqueued. sent: by copies, or by stores of a kernel."""
    system = work.system
    enqueued = in_places(system, items)
    kernels = [item for item in enqueued if isinstance(item, Kernel)]
    sending = [*sent, *(item for item in enqueued if isinstance(item, Send))]
    arrivals = tuple(item for item in enqueued if isinstance(item, Arrival))
    return Program(
        work.topology.rank, work.world, tuple(kernels), tuple(sending),
        host_us(system, kernels, sending), store_gbs=system.tile_store_gbs, nodes=work.topology.nodes,
        arrivals=arrivals,
    )  # fmt: skip


def host_us(system: System, kernels: Sequence[Kernel], sending: Sequence[Send], operators: int = 1) -> float:
    """Microseconds of host time until a call returns: exchanges between nodes, driver calls for kernels and pushes, and what each
    operator has besides."""
    exchanges = sum(send.leg.link == NETWORK for send in sending)
    calls = sum(map(_push_calls, sending)) + sum(map(_calls, kernels))
    return system.host_exchange_us * exchanges + system.host_call_us * (OTHER_CALLS * operators + calls)


def _push_calls(send: Send) -> int:
    stores = send.ready is not None and send.ready[0] == STARTED
    if stores or send.leg.link == NETWORK:  # by the kernel, or an exchange, which is not counted in calls
        return 0
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


def _launches(work: Work, kernel: Kernel) -> Iterator[Item]:
    """The launches of a kernel that multiplies what arrives: one, or across nodes one after each wait for something from far."""
    ahead, chunks, takes_some = crossings(work), work.plan.chunks, replace(kernel, leaves=True)
    yield from ahead.until(1)
    if work.topology.nodes == 1:
        yield kernel
        return
    counts = Kernel("count_arrivals_kernel", COMPUTE, work.system.wait_us, work.system.gap_us)
    if work.plan.kind == GATHER:
        yield takes_some
    turns = list(far_arrivals(work))
    for turn, arrivals in enumerate(turns):
        if work.plan.kind == GATHER:
            yield from ahead.go_ahead(chunks + turn, chunks * work.topology.nodes)
            yield from ahead.bring(turn + 1)
        else:
            yield from ahead.bring_chunk(turn, chunks)
        yield wait(work, arrivals)
        yield from (counts, takes_some) if turn < len(turns) - 1 else (kernel,)


def _persistent(work: Work, name: str, tiles: tuple[Tile, ...]) -> Kernel:
    us, gap = work.system.ramp_us, work.system.gap_us
    return Kernel(name, GEMM, us, gap, tiles=tiles, sms=work.kernel_sms, starts=work.started)
