"""Who sends which piece to whom, after what, and in which order tiles are computed. Nothing else knows an order.

The engines execute the legs; tests hold the order in which kernels take tiles to `tile_order`.

    gather (AG + GEMM)    rank R sends its shard to R+1, R+2, ...; it multiplies its own shard, then those of R-1, R-2, ...:
                          the order in which they arrive
    scatter (GEMM + RS)   rank R computes the rows of R+1, R+2, ... and its own last; rows leave when they are complete
    gemm_a2a              as scatter, but what rank R computes for R+1, R+2, ... are their columns of its own rows
    a2a_gemm              rank R sends chunk 0 of their rows to R+1, R+2, ..., then chunk 1; every tile of its own rows multiplies
                          its own columns, then those of R-1, R-2, ..., in one accumulator
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

GATHER, SCATTER = "gather", "scatter"
A2A_GEMM, GEMM_A2A = "a2a_gemm", "gemm_a2a"
INBOUND = (GATHER, A2A_GEMM)  # what arrives is multiplied; the others multiply what leaves
EXCHANGES = (A2A_GEMM, GEMM_A2A)
NVLINK = "nvlink"


@dataclass(frozen=True)
class Topology:
    """`nodes` nodes of `local` ranks each, of which this is rank `rank`. Today one node."""

    nodes: int
    local: int
    rank: int

    @property
    def world(self) -> int:
        return self.nodes * self.local


@dataclass(frozen=True)
class Leg:
    """One transfer: chunk `chunk` of block `block` of the sender's source, to rank `target`, where it fills the sender's block.

    link: what carries it. block: 0 where the source is one shard for all, else the target. after_tiles: the chunk's tiles must
    be stored first; else it may leave at once. The signal that announces it is that of (sender, chunk) at the target.
    """

    link: str
    source: int
    target: int
    block: int
    chunk: int
    after_tiles: bool


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


def legs(kind: str, topology: Topology, chunks: int, after_tiles: bool = False) -> Legs:
    """What rank `topology.rank` sends. chunks: of each block."""
    assert topology.nodes == 1, "schedules of several nodes come with their engines"
    pieces = [(target, chunk) for target in targets(topology) for chunk in range(chunks)]
    if kind == A2A_GEMM:  # a tile needs its chunk from every rank
        pieces.sort(key=lambda piece: piece[1])
    return Legs(
        tuple(
            Leg(NVLINK, topology.rank, target, 0 if kind == GATHER else target, chunk, after_tiles)
            for target, chunk in pieces
        )
    )


def targets(topology: Topology) -> tuple[int, ...]:
    """The other ranks in the order in which this one sends to them: nearest following first."""
    return tuple((topology.rank + step) % topology.world for step in range(1, topology.world))


def sources(topology: Topology) -> tuple[int, ...]:
    """The other ranks in the order in which their blocks arrive: nearest preceding first."""
    return tuple((topology.rank - step) % topology.world for step in range(1, topology.world))


def tile_order(
    kind: str, topology: Topology, chunks: int, tiles: int, interleaved: bool = False
) -> Iterator[tuple[int, int, int]]:
    """(block, chunk, tile) in the order in which a persistent kernel takes tiles; `tiles` of each chunk.

    gather: block s is the shard of rank s. scatter: block d are the rows of rank d; gemm_a2a: its columns. a2a_gemm: there is the
    own block only. interleaved: a kernel that stores tiles at the peers takes tiles for all of them in turn; skewed ranks would
    otherwise hit the same destination, halve its ingress bandwidth, and stay skewed.
    """
    if kind in INBOUND:
        blocks: tuple[int, ...] = (topology.rank, *sources(topology)) if kind == GATHER else (topology.rank,)
    elif interleaved:
        for place in range(chunks * tiles):
            yield from ((target, *divmod(place, tiles)) for target in targets(topology))
        blocks = (topology.rank,)
    else:
        blocks = (*targets(topology), topology.rank)
    for block in blocks:
        yield from ((block, chunk, tile) for chunk in range(chunks) for tile in range(tiles))
