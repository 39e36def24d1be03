"""What a rank does besides where its group spans nodes, as operators/ has it (node_streams.py, node_exchanges.py).

Three things wait apart, so that none holds up another: own data for the network, what is passed on once it has arrived or landed,
and sums of a node, each of which crosses the network when it is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ....methods import TRAITS
from ....planning import cost
from ....schedule.inter_node import leaving
from ....schedule.order import GATHER, INBOUND, Unit
from ....schedule.transfers import ARRIVED, LANDED, NETWORK, NODE_SUM, Leg
from .timeline import COMPUTE, COPIES, PASSED_ON, TO_NETWORK, Kernel, Token, arrived, landed, stored
from .work import Work

SUMS = 2  # their stream; 1 is NCCL's (backward.py)


def multiplied(work: Work, block: int, chunk: int = 0) -> Token:
    """This rank's product for a block by the library: whole inside one node (0), chunk by chunk where the group spans nodes."""
    return (work.call, "rows", block, chunk)


def made(work: Work, block: int, chunk: int) -> Token:
    """This rank's product for a chunk of a block, by a persistent kernel, or as `multiplied` by the library."""
    in_tiles = TRAITS[work.plan.method].multiplies
    return stored(work.call, block, chunk) if in_tiles else multiplied(work, block, chunk)


def summed(work: Work, block: int, chunk: int) -> Token:
    """The sum of this node's partials for a chunk of a far block."""
    return (work.call, "sum", block, chunk)


def lane_of(leg: Leg) -> str:
    if leg.link == NETWORK:
        return TO_NETWORK
    return PASSED_ON if leg.carries in (ARRIVED, LANDED) else COPIES


def in_order(work: Work) -> Iterator[Leg]:
    """The legs of a pass in the order in which engines send them. What arrives is passed on chunk by chunk, to every rank of the
    node; what lands, as it comes."""
    legs = work.plan.legs
    yield from sorted((leg for leg in legs if leg.carries != ARRIVED), key=_turn_of(work))
    for _, passed_on in legs.passed_on.by_block:
        yield from sorted(passed_on, key=lambda leg: leg.chunk)
    for crossing in work.plan.send_recvs:
        if crossing.for_another:
            yield from crossing.passed_on


def _turn_of(work: Work) -> Callable[[Leg], int]:
    """When a leg comes to its turn: by the library what leaves follows its product; else legs come as they are."""
    if work.plan.kind in INBOUND or TRAITS[work.plan.method].multiplies:
        return lambda leg: 0
    places = {unit: place for place, unit in enumerate(unit for _, units in turns(work) for unit in units)}
    return lambda leg: places[leg.block, leg.chunk]


def turns(work: Work) -> tuple[tuple[str, tuple[Unit, ...]], ...]:
    """What is enqueued of products by the library, and of exchanges between them (ResultCrossings)."""
    between = 0 if work.follows else len(work.plan.send_recvs)
    return leaving(work.plan.kind, work.topology, work.plan.chunks, between)


def waits_for(work: Work, leg: Leg) -> Token | None:
    """What a leg that does not carry an own operand waits for."""
    if leg.carries == NODE_SUM:
        return summed(work, leg.block, leg.chunk)
    if leg.carries == LANDED:
        return landed(work.call, leg.target, leg.block, leg.chunk)
    return arrived(work.call, leg.block, leg.chunk) if leg.carries == ARRIVED else None


def far_turns(work: Work) -> Iterator[tuple[Unit, ...]]:
    """What a gather multiplies of far nodes in each turn: of each node one chunk of all its ranks after the other."""
    local, sources = work.topology.local, work.plan.sources
    for first in range(local - 1, len(sources), local):
        for chunk in range(work.plan.chunks):
            yield tuple((source, chunk) for source in sources[first : first + local])


def far_arrivals(work: Work) -> Iterator[tuple[Token, ...]]:
    """What is waited for before each launch of a kernel that multiplies what arrives: a chunk of all ranks of a far node, or (A2A
    + GEMM, where each tile needs them) of all ranks."""
    if work.plan.kind == GATHER:
        yield from (tuple(arrived(work.call, *unit) for unit in turn) for turn in far_turns(work))
    else:
        yield from (work.arrivals(chunk) for chunk in range(work.plan.chunks))


def node_sums(work: Work) -> list[Kernel]:
    """A kernel for each chunk of each far node, in the order of the products: it reads this node's partials, and writes their
    sum."""
    return [_node_sum(work, leg) for leg in work.plan.legs.network if leg.carries == NODE_SUM]


def _node_sum(work: Work, leg: Leg) -> Kernel:
    block, chunk = leg.block, leg.chunk
    ranks = work.topology.ranks_of(block // work.topology.local)
    needs = (made(work, block, chunk), *(arrived(work.call, rank, chunk) for rank in ranks if rank != block))
    us, gap = _node_sum_us(work) / work.plan.chunks, work.system.gap_us
    return Kernel("node sum", COMPUTE, us, gap, needs=needs, ends=summed(work, block, chunk), stream=SUMS)


def _node_sum_us(work: Work) -> float:
    """Microseconds that the sum of a whole block over the ranks of a node takes on the SMs that it has, which products spare. In
    a node of one rank there is nothing to add."""
    local = work.topology.local
    return cost.sum_us(work.system, (local + 1) * work.shard_bytes, work.plan.reduce_sms) if local > 1 else 0.0
