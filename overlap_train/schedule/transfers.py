"""What a rank sends, to whom, after what, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from .kinds import Kind
from .order import Topology, Unit, targets

NVLINK, NETWORK = "nvlink", "network"
OPERAND, ARRIVED, NODE_SUM, LANDED = "operand", "arrived", "node sum", "landed"  # what a leg carries


@dataclass(frozen=True)
class Leg:
    """One transfer: chunk `chunk` of block `block` of the sender's source, to rank `target`, where it fills block `fills`.

    link: what carries it; from the network `Topology.receiver` takes it, for itself or for the target. block: 0 where the source
    is one shard for all, else whose rows or columns they are. after_tiles: the chunk's tiles must be stored first; else it may
    leave at once. fills: the sender's block, except where it acts for a rail peer. carries: OPERAND, from what the caller has or
    its tiles; ARRIVED, passed on out of the own slot once it is there; NODE_SUM, once this node's partial sums of the block are
    there and added; LANDED, passed on out of a receive buffer, into which it came for the target (SendRecv alone has such legs).
    The signal is that of (fills, chunk) at the target.
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
        """The legs that pass on what has arrived from a rail peer."""
        return Legs(tuple(leg for leg in self.all if leg.carries == ARRIVED))


def legs(kind: Kind, topology: Topology, chunks: int, tiled: bool = False) -> Legs:
    """What rank `topology.rank` sends in a group inside one node; between nodes: inter_node.py.

    chunks: of each block. tiled: copies send what a persistent kernel multiplies, or has multiplied.
    """
    rank, after_tiles = topology.rank, tiled and not kind.receives
    pieces = [(target, chunk) for target in targets(topology) for chunk in range(chunks)]
    if kind.sums_blocks:  # a tile needs its chunk from every rank
        pieces.sort(key=lambda piece: piece[1])
    return Legs(
        tuple(
            Leg(NVLINK, rank, target, 0 if kind.gathers else target, chunk, after_tiles, fills=rank)
            for target, chunk in pieces
        )
    )
