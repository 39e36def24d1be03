"""Whose block comes next when a rank sends and when it multiplies, and what it sends.

kernels/order.py and kernels/tiles.py work out the same on the GPU, each rank from its own number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from operator import attrgetter

from .kinds import Kind


@dataclass(frozen=True)
class Topology:
    """`nodes` nodes of `local` ranks each, numbered node by node, of which this is rank `rank`."""

    nodes: int
    local: int
    rank: int

    @cached_property
    def world(self) -> int:
        return self.nodes * self.local

    @cached_property
    def node(self) -> int:
        """The node of this rank."""
        return self.rank // self.local

    def rail_peer(self, node: int) -> int:
        """The rank of `node` with the same local rank as this one."""
        return node * self.local + self.rank % self.local

    def ranks_of(self, node: int) -> range:
        """All ranks of `node`."""
        return range(node * self.local, (node + 1) * self.local)

    def sender(self, block: int) -> int:
        """Who writes block `block` of this rank's slots: rank `block` if that is a rail peer, else its rail peer here."""
        return block if block == self.rail_peer(block // self.local) else self.node * self.local + block % self.local

    def receiver(self, target: int) -> int:
        """Who takes from the network what this rank sends to `target`: the only rank there that it is connected with."""
        return self.rail_peer(target // self.local)


Unit = tuple[int, int]  # (block, chunk)


@cache
def targets(topology: Topology) -> tuple[int, ...]:
    """The other ranks in the order in which this one sends to them: far nodes first, in each the nearest following first."""
    nodes, locals_ = range(1, topology.nodes + 1), range(1, topology.local + 1)
    return tuple([_shifted(topology, node, place) for node in nodes for place in locals_][:-1])


@cache
def sources(topology: Topology, kind: Kind = Kind.AG_GEMM) -> tuple[int, ...]:
    """The other ranks in the order in which their blocks arrive: own node first, in each node the nearest preceding first.

    Of a far node a gather brings the rail peer's block first, and the others by way of this node. In an all-to-all every rank
    there sends to its rail peer last.
    """
    first = int(kind.exchanges)
    near = [_shifted(topology, 0, -place) for place in range(1, topology.local)]
    nodes, locals_ = range(1, topology.nodes), range(first, topology.local + first)
    return *near, *(_shifted(topology, -node, -place) for node in nodes for place in locals_)


def _shifted(topology: Topology, nodes: int, places: int) -> int:
    """The rank so many nodes, and places in a node, further."""
    node, place = (topology.node + nodes) % topology.nodes, (topology.rank + places) % topology.local
    return node * topology.local + place


def units_in_run(kind: Kind, world: int, chunks: int, interleaved: bool, adds: bool) -> int:
    """How many chunks a run has, in which tiles may cross from one to the next: all, those of one block, or all but the own
    block. The last run may have fewer.

    In GEMM + A2A each block has other columns of b, and the strips of a tile share those. Blocks that take turns do not follow
    one another. adds: own tiles wait for the peers' partials. With a peer's strip above, one would wait for such tiles of the
    peers. Then all resident CTAs might hold one, and those behind them would never begin (rule 4).
    """
    if kind.exchanges or (interleaved and not kind.receives and world > 2):
        return chunks
    return chunks * (max(1, world - 1) if adds else world)


NVLINK, NETWORK = "nvlink", "network"
OPERAND, ARRIVED, NODE_SUM, LANDED = "operand", "arrived", "node sum", "landed"  # what a transfer carries


@dataclass(frozen=True)
class Transfer:
    """One transfer: chunk `chunk` of block `block` of the sender's source, to rank `target`, where it fills block `fills`. The
    signal is that of (fills, chunk) there.

    link: what carries it; from the network `Topology.receiver` takes it, for itself or for the target. block: 0 where the source
    is one shard for all. after_tiles: the chunk's tiles must be stored first. fills: the sender's block, except where it acts for
    a rail peer. carries: OPERAND, from what the caller has or its tiles; ARRIVED, passed on out of the own slot once it is there;
    NODE_SUM, once this node's partial sums of the block are added; LANDED, passed on out of a receive buffer.
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
        return self._grouped("target")

    @cached_property
    def by_block(self) -> tuple[tuple[int, Transfers], ...]:
        """(block, its transfers) in order."""
        return self._grouped("block")

    def _grouped(self, field: str) -> tuple[tuple[int, Transfers], ...]:
        return tuple((key, Transfers(tuple(some))) for key, some in groupby(self.all, attrgetter(field)))

    @cached_property
    def by_unit(self) -> Mapping[Unit, Transfers]:
        """(block, chunk) -> its transfers in order."""
        found: dict[Unit, list[Transfer]] = {}
        for transfer in self.all:
            found.setdefault((transfer.block, transfer.chunk), []).append(transfer)
        return {unit: Transfers(tuple(some)) for unit, some in found.items()}

    @cached_property
    def network(self) -> Transfers:
        """The transfers that cross the network."""
        return Transfers(tuple([one for one in self.all if one.link == NETWORK]))

    @cached_property
    def inside(self) -> Transfers:
        """The transfers inside the node that carry what this rank has itself."""
        return Transfers(tuple([one for one in self.all if one.link == NVLINK and one.carries == OPERAND]))

    @cached_property
    def passed_on(self) -> Transfers:
        """The transfers that pass on what has arrived from a rail peer."""
        return Transfers(tuple([one for one in self.all if one.carries == ARRIVED]))


def transfers_of(kind: Kind, topology: Topology, chunks: int, tiled: bool = False) -> Transfers:
    """What rank `topology.rank` sends. chunks: of each block. tiled: a persistent kernel multiplies what copies send."""
    rank, node, after_tiles = topology.rank, topology.node, tiled and not kind.receives
    links = {target: NVLINK if target // topology.local == node else NETWORK for target in targets(topology)}
    if kind.gathers:
        return Transfers(tuple(_gathered(topology, links, chunks, after_tiles)))
    if kind.reduces:
        return Transfers(tuple(_scattered(topology, links, chunks, after_tiles)))
    pieces = [(target, chunk) for target in links for chunk in range(chunks)]
    if kind.sums_blocks and (tiled or NETWORK not in links.values()):  # a tile needs its chunk from every rank
        pieces.sort(key=lambda piece: (links[piece[0]] == NVLINK, piece[1]))
    found = [Transfer(links[target], rank, target, target, chunk, after_tiles, fills=rank) for target, chunk in pieces]
    return Transfers(tuple(found))


def _gathered(topology: Topology, links: Mapping[int, str], chunks: int, after_tiles: bool) -> list[Transfer]:
    rank, own_node = topology.rank, [target for target, link in links.items() if link == NVLINK]
    following = [topology.rail_peer((topology.node + turn) % topology.nodes) for turn in range(1, topology.nodes)]
    found = [
        Transfer(links[target], rank, target, 0, chunk, after_tiles, fills=rank)
        for target in (*following, *own_node)
        for chunk in range(chunks)
    ]
    passed_on = [
        Transfer(NVLINK, rank, target, block, chunk, False, fills=block, carries=ARRIVED)
        for block in reversed(following)
        for target in own_node
        for chunk in range(chunks)
    ]
    return found + passed_on


def _scattered(topology: Topology, links: Mapping[int, str], chunks: int, after_tiles: bool) -> list[Transfer]:
    """For each node, far ones first, its ranks' blocks to their rail peers here; the last of a node is the own rail peer's."""
    rank, found = topology.rank, []
    for block in links:
        peer = topology.rail_peer(block // topology.local)
        near = topology.node * topology.local + block % topology.local
        for chunk in range(chunks):
            if block == peer:
                found.append(Transfer(NETWORK, rank, block, block, chunk, after_tiles, fills=rank, carries=NODE_SUM))
            else:
                found.append(Transfer(NVLINK, rank, near, block, chunk, after_tiles, fills=peer))
    return found
