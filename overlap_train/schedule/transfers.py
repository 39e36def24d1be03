"""What a rank sends, to whom, after what, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, product

from .order import A2A_GEMM, GATHER, INBOUND, SCATTER, Topology, Unit, targets

NVLINK, NETWORK = "nvlink", "network"
OPERAND, ARRIVED, NODE_SUM, LANDED = "operand", "arrived", "node sum", "landed"  # what a leg carries


@dataclass(frozen=True)
class Leg:
    """One transfer: chunk `chunk` of block `block` of the sender's source, to rank `target`, where it fills block `fills`.

    link: what carries it; from the network `Topology.receiver` takes it, for itself or for the target. block: 0 where the source
    is one shard for all, else whose rows or columns they are. after_tiles: the chunk's tiles must be stored first; else it may
    leave at once. fills: the sender's block, except where it acts for a far twin. carries: OPERAND, from what the caller has or
    its tiles; ARRIVED, passed on out of the own slot once it is there; NODE_SUM, once this node's partial sums of the block are
    there and added; LANDED, passed on out of memory beside the slot, where the network has brought it for the target (crossings
    alone have such legs). The signal is that of (fills, chunk) at the target.
    """

    link: str
    source: int
    target: int
    block: int
    chunk: int
    after_tiles: bool
    fills: int
    carries: str = OPERAND


@dataclass(frozen=True, eq=False)
class Legs:
    """The legs of one rank in one pass, in order. Compared by identity: engines look up their routes by it on every call."""

    all: tuple[Leg, ...]

    def __iter__(self) -> Iterator[Leg]:
        return iter(self.all)

    @cached_property
    def by_target(self) -> tuple[tuple[int, Legs], ...]:
        """(target, its legs) in order."""
        return tuple((target, Legs(tuple(legs))) for target, legs in groupby(self.all, lambda leg: leg.target))

    @cached_property
    def by_block(self) -> tuple[tuple[int, Legs], ...]:
        """(block, its legs) in order."""
        return tuple((block, Legs(tuple(legs))) for block, legs in groupby(self.all, lambda leg: leg.block))

    @cached_property
    def by_unit(self) -> Mapping[Unit, Legs]:
        """(block, chunk) -> its legs in order."""
        found: dict[Unit, list[Leg]] = {}
        for leg in self.all:
            found.setdefault((leg.block, leg.chunk), []).append(leg)
        return {unit: Legs(tuple(some)) for unit, some in found.items()}

    @cached_property
    def places(self) -> Mapping[Unit, int]:
        """(block, chunk) -> where its leg stands among these, of which no two carry the same."""
        return {(leg.block, leg.chunk): place for place, leg in enumerate(self.all)}

    @cached_property
    def network(self) -> Legs:
        """The legs that cross the network."""
        return Legs(tuple(leg for leg in self.all if leg.link == NETWORK))

    @cached_property
    def inside(self) -> Legs:
        """The legs inside the node that carry what this rank has itself."""
        return Legs(tuple(leg for leg in self.all if leg.link == NVLINK and leg.carries == OPERAND))

    @cached_property
    def passed_on(self) -> Legs:
        """The legs that pass on what has arrived from a far twin."""
        return Legs(tuple(leg for leg in self.all if leg.carries == ARRIVED))


def legs(kind: str, topology: Topology, chunks: int, tiled: bool = False) -> Legs:
    """What rank `topology.rank` sends. chunks: of each block. tiled: copies send what a persistent kernel multiplies, or has
    multiplied."""
    after_tiles = tiled and kind not in INBOUND
    if topology.nodes > 1 and kind in _ACROSS_NODES:
        return Legs(tuple(_ACROSS_NODES[kind](topology, chunks, after_tiles)))
    rank = topology.rank
    pieces = [(target, chunk) for target in targets(topology) for chunk in range(chunks)]
    # A tile needs its chunk from every rank. Across nodes the library multiplies whole blocks.
    if kind == A2A_GEMM and (tiled or topology.nodes == 1):
        pieces.sort(key=lambda piece: (_link(topology, piece[0]) == NVLINK, piece[1]))
    return Legs(
        tuple(
            Leg(_link(topology, target), rank, target, 0 if kind == GATHER else target, chunk, after_tiles, fills=rank)
            for target, chunk in pieces
        )
    )


def _link(topology: Topology, target: int) -> str:
    return NVLINK if target in topology.ranks_of(topology.node) else NETWORK


def _gather_across_nodes(topology: Topology, chunks: int, after_tiles: bool) -> Iterator[Leg]:
    rank = topology.rank
    own_node = [target for target in targets(topology) if _link(topology, target) == NVLINK]
    for target in (*_twins(topology, 1), *own_node):
        for chunk in range(chunks):
            yield Leg(_link(topology, target), rank, target, 0, chunk, after_tiles, fills=rank)
    for block in _twins(topology, -1):
        for target, chunk in product(own_node, range(chunks)):
            yield Leg(NVLINK, rank, target, block, chunk, False, fills=block, carries=ARRIVED)


def _scatter_across_nodes(topology: Topology, chunks: int, after_tiles: bool) -> Iterator[Leg]:
    rank = topology.rank
    for block, chunk in product(targets(topology), range(chunks)):
        node, place = divmod(block, topology.local)
        if block == topology.twin(node):  # the last of its node
            yield Leg(NETWORK, rank, block, block, chunk, after_tiles, fills=rank, carries=NODE_SUM)
        else:
            beside = topology.node * topology.local + place
            yield Leg(NVLINK, rank, beside, block, chunk, after_tiles, fills=topology.twin(node))


_ACROSS_NODES = {GATHER: _gather_across_nodes, SCATTER: _scatter_across_nodes}


def _twins(topology: Topology, step: int) -> list[int]:
    """The twins of this rank in the far nodes; those of following (step 1) or preceding (-1) nodes first."""
    far = ((topology.node + step * turn) % topology.nodes for turn in range(1, topology.nodes))
    return [topology.twin(node) for node in far]
