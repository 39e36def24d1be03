"""What a rank sends, to whom, after what, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from .kinds import Kind
from .order import Topology, Unit, targets

NVLINK, NETWORK = "nvlink", "network"
OPERAND, ARRIVED, NODE_SUM, LANDED = "operand", "arrived", "node sum", "landed"  # what a transfer carries


@dataclass(frozen=True)
class Transfer:
    """One transfer: chunk `chunk` of block `block` of the sender's source, to rank `target`, where it fills block `fills`.

    link: what carries it; from the network `Topology.receiver` takes it, for itself or for the target. block: 0 where the source
    is one shard for all, else whose rows or columns they are. after_tiles: the chunk's tiles must be stored first; else it may
    leave at once. fills: the sender's block, except where it acts for a rail peer. carries: OPERAND, from what the caller has or
    its tiles; ARRIVED, passed on out of the own slot once it is there; NODE_SUM, once this node's partial sums of the block are
    there and added; LANDED, passed on out of a receive buffer, into which it came for the target (SendRecv alone has such
    transfers). The signal is that of (fills, chunk) at the target.
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
class Transfers:
    """The transfers of one rank in one pass, in order. Compared by identity: engines look up their routes by it on every call."""

    all: tuple[Transfer, ...]

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self.all)

    @cached_property
    def by_target(self) -> tuple[tuple[int, Transfers], ...]:
        """(target, its transfers) in order."""
        return tuple(
            (target, Transfers(tuple(transfers)))
            for target, transfers in groupby(self.all, lambda transfer: transfer.target)
        )

    @cached_property
    def by_block(self) -> tuple[tuple[int, Transfers], ...]:
        """(block, its transfers) in order."""
        return tuple(
            (block, Transfers(tuple(transfers)))
            for block, transfers in groupby(self.all, lambda transfer: transfer.block)
        )

    @cached_property
    def by_unit(self) -> Mapping[Unit, Transfers]:
        """(block, chunk) -> its transfers in order."""
        found: dict[Unit, list[Transfer]] = {}
        for transfer in self.all:
            found.setdefault((transfer.block, transfer.chunk), []).append(transfer)
        return {unit: Transfers(tuple(some)) for unit, some in found.items()}

    @cached_property
    def places(self) -> Mapping[Unit, int]:
        """(block, chunk) -> where its transfer stands among these, of which no two carry the same."""
        return {(transfer.block, transfer.chunk): place for place, transfer in enumerate(self.all)}

    @cached_property
    def network(self) -> Transfers:
        """The transfers that cross the network."""
        return Transfers(tuple(transfer for transfer in self.all if transfer.link == NETWORK))

    @cached_property
    def inside(self) -> Transfers:
        """The transfers inside the node that carry what this rank has itself."""
        return Transfers(
            tuple(transfer for transfer in self.all if transfer.link == NVLINK and transfer.carries == OPERAND)
        )

    @cached_property
    def passed_on(self) -> Transfers:
        """The transfers that pass on what has arrived from a rail peer."""
        return Transfers(tuple(transfer for transfer in self.all if transfer.carries == ARRIVED))


def transfers_of(kind: Kind, topology: Topology, chunks: int, tiled: bool = False) -> Transfers:
    """What rank `topology.rank` sends in a group inside one node; between nodes: inter_node.py.

    chunks: of each block. tiled: copies send what a persistent kernel multiplies, or has multiplied.
    """
    rank, after_tiles = topology.rank, tiled and not kind.receives
    pieces = [(target, chunk) for target in targets(topology) for chunk in range(chunks)]
    if kind.sums_blocks:  # a tile needs its chunk from every rank
        pieces.sort(key=lambda piece: piece[1])
    return Transfers(
        tuple(
            Transfer(NVLINK, rank, target, 0 if kind.gathers else target, chunk, after_tiles, fills=rank)
            for target, chunk in pieces
        )
    )
