"""Who sends which piece to whom, after what, and in which order tiles are computed. Nothing else knows an order.

The engines execute the legs; tests hold the order in which kernels take tiles to `tile_order`, and to `strip_order` those of
Hopper, whose tiles may cross from one chunk into the next.

    gather (AG + GEMM)    rank R sends its shard to R+1, R+2, ...; it multiplies its own shard, then those of R-1, R-2, ...:
                          the order in which they arrive
    scatter (GEMM + RS)   rank R computes the rows of R+1, R+2, ... and its own last; rows leave when they are complete
    gemm_a2a              as scatter, but what rank R computes for R+1, R+2, ... are their columns of its own rows
    a2a_gemm              rank R sends chunk 0 of their rows to R+1, R+2, ..., then chunk 1; every tile of its own rows multiplies
                          its own columns, then those of R-1, R-2, ..., in one accumulator

Across nodes each byte crosses the network once, between ranks of equal local rank (twins). Gather and scatter go in two steps:

    gather                a shard goes to the twins first, then to the own node; what arrives from a twin is passed on inside the
                          node. Tiles in order of arrival: own, own node, then far node by far node, of each the first chunk of
                          all its ranks, then the second
    scatter               for each node, far ones first and the own one last: the blocks of its ranks go to their twins inside
                          this node, which add them up; the sum goes to the far twin
    a2a_gemm, gemm_a2a    blocks of far nodes go first, and of each node that of the twin last. The twin takes them from the
                          network and puts each into the memory of the rank that it is for: CPU processes at once, GPUs by a
                          copy out of memory beside the slot. a2a_gemm multiplies the blocks of the own node first, then far
                          node by far node. A persistent kernel multiplies one chunk of all of them after the other, the library
                          whole blocks
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, groupby, product, repeat

GATHER, SCATTER = "gather", "scatter"
A2A_GEMM, GEMM_A2A = "a2a_gemm", "gemm_a2a"
INBOUND = (GATHER, A2A_GEMM)  # what arrives is multiplied; the others multiply what leaves
EXCHANGES = (A2A_GEMM, GEMM_A2A)
NVLINK, NETWORK = "nvlink", "network"
OPERAND, ARRIVED, NODE_SUM, LANDED = "operand", "arrived", "node sum", "landed"  # what a leg carries

Unit = tuple[int, int]  # (block, chunk)


@dataclass(frozen=True)
class Topology:
    """`nodes` nodes of `local` ranks each, numbered node by node, of which this is rank `rank`."""

    nodes: int
    local: int
    rank: int

    @property
    def world(self) -> int:
        return self.nodes * self.local

    @property
    def node(self) -> int:
        """The node of this rank."""
        return self.rank // self.local

    def twin(self, node: int) -> int:
        """The rank of `node` with the same local rank as this one."""
        return node * self.local + self.rank % self.local

    def ranks_of(self, node: int) -> range:
        """All ranks of `node`."""
        return range(node * self.local, (node + 1) * self.local)

    def sender(self, block: int) -> int:
        """Who writes block `block` of this rank's slots, in every call: rank `block` if that is a twin, else its twin here."""
        return block if block == self.twin(block // self.local) else self.node * self.local + block % self.local

    def receiver(self, target: int) -> int:
        """Who takes from the network what this rank sends to `target` of another node: the only rank there that it is connected
        with."""
        return self.twin(target // self.local)


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


@dataclass(frozen=True)
class Crossing:
    """What a rank sends over the network, what it receives meanwhile, and the legs that pass the latter on inside the node."""

    sent: Leg
    received: Leg
    passed_on: Legs

    @property
    def lands(self) -> bool:
        """Whether what is received is for another rank of this node, in whose memory the network does not write."""
        return self.received.target != self.sent.source


def crossings(kind: str, topology: Topology, chunks: int, tiled: bool = False) -> tuple[Crossing, ...]:
    """All of one pass, in order, for transports whose receiver must say what it expects: twins work out the same.

    The legs of all ranks go equally far in each turn. So twins come to their parts of a crossing in the same order, and what
    comes is what the rank so many nodes before sends: this rank's leg, moved back. To ask every twin for its legs would take
    minutes with 1,024 nodes.
    """
    mine, found = legs(kind, topology, chunks, tiled), []
    onward = mine.passed_on.by_unit
    for sent in mine.network:
        distance = sent.target // topology.local - topology.node
        received = _moved(kind, topology, sent, -distance)
        found.append(Crossing(sent, received, _passed_on(onward, topology.rank, received)))
    return tuple(found)


def _moved(kind: str, topology: Topology, leg: Leg, nodes: int) -> Leg:
    """The same leg of the rank that is `nodes` nodes further."""

    def moved(rank: int) -> int:
        return (rank + nodes * topology.local) % topology.world

    block = leg.block if kind == GATHER else moved(leg.block)
    return replace(leg, source=moved(leg.source), target=moved(leg.target), block=block, fills=moved(leg.fills))


def _passed_on(onward: Mapping[Unit, Legs], rank: int, received: Leg) -> Legs:
    """What rank `rank`, which passes on `onward`, does with what it has received."""
    block, chunk, target = received.fills, received.chunk, received.target
    if target != rank:
        return Legs((Leg(NVLINK, rank, target, block, chunk, False, fills=block, carries=LANDED),))
    return onward.get((block, chunk), Legs(()))


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


def targets(topology: Topology) -> tuple[int, ...]:
    """The other ranks in the order in which this one sends to them, or computes for them: far nodes first, in each node the
    nearest following first."""
    nodes, locals_ = range(1, topology.nodes + 1), range(1, topology.local + 1)
    return tuple(_shifted(topology, node, place) for node in nodes for place in locals_)[:-1]


def sources(topology: Topology, kind: str = GATHER) -> tuple[int, ...]:
    """The other ranks in the order in which their blocks arrive: own node first, in each node the nearest preceding first.

    Of a far node a gather brings the twin's block first, and the others by way of this node. In an all-to-all every rank there
    sends to its twin last.
    """
    first = int(kind in EXCHANGES)
    near = [_shifted(topology, 0, -place) for place in range(1, topology.local)]
    nodes, locals_ = range(1, topology.nodes), range(first, topology.local + first)
    return *near, *(_shifted(topology, -node, -place) for node in nodes for place in locals_)


@cache
def multiplied_together(topology: Topology, together: int) -> tuple[tuple[int, ...], ...]:
    """The blocks of a2a_gemm in the order in which the library multiplies them: the own one, then as they arrive; up to
    `together` of one node at once."""
    nodes = _by_node((topology.rank, *sources(topology, A2A_GEMM)), topology.local)
    return tuple(node[first : first + together] for node in nodes for first in range(0, topology.local, together))


def _shifted(topology: Topology, nodes: int, places: int) -> int:
    """The rank so many nodes, and places in a node, further."""
    node, place = (topology.node + nodes) % topology.nodes, (topology.rank + places) % topology.local
    return node * topology.local + place


def tile_order(
    kind: str, topology: Topology, chunks: int, tiles: int, interleaved: bool = False
) -> Iterator[tuple[int, int, int]]:
    """(block, chunk, tile) in the order in which a portable kernel takes tiles; `tiles` of each chunk."""
    run = units_in_run(kind, topology.world, chunks, interleaved, adds=False)
    return (place for place, _ in strip_order(kind, topology, chunks, Strips(tiles, 1, 1, run), interleaved))


@dataclass(frozen=True)
class Strips:
    """How chunks are cut: strips of rows of each, columns of tiles, strips of a tile, and chunks of a run (units_in_run)."""

    rows: int
    columns: int
    parts: int
    run: int


def strip_order(
    kind: str, topology: Topology, chunks: int, strips: Strips, interleaved: bool = False
) -> Iterator[tuple[tuple[int, int, int], tuple[Unit, ...]]]:
    """((block, chunk, number in it), (block, chunk) of each of its parts) of each tile, in the order in which a persistent kernel
    takes them.

    Strips are numbered through the chunks of a run. So a tile's strips may be of two chunks: it belongs to the last one's and
    comes before the others of that. A strip that is missing at the end of a run counts as one of the run's last chunk.

    gather: block s is the shard of rank s. scatter: block d are the rows of rank d; gemm_a2a: its columns. a2a_gemm: there is the
    own block only. interleaved: a kernel that stores tiles at the peers takes tiles for all of them in turn; skewed ranks would
    otherwise hit the same destination, halve its ingress bandwidth, and stay skewed.
    """
    units = _units(kind, topology, chunks)
    starts = range(0, len(units), strips.run)
    runs = [list(_tiles_of_run(units[start : start + strips.run], strips)) for start in starts]
    if interleaved:
        assert topology.nodes == 1, "kernels that store at the peers stay in their node"
        *foreign, own = runs
        runs = [[tile for turn in zip(*foreign, strict=True) for tile in turn], own]
    numbers = Counter[Unit]()
    for parts in chain.from_iterable(runs):
        yield (*parts[-1], numbers[parts[-1]]), parts
        numbers[parts[-1]] += 1


def units_in_run(kind: str, world: int, chunks: int, interleaved: bool, adds: bool) -> int:
    """How many chunks a run has, in which tiles may cross from one to the next: all, those of one block, or all but the own
    block. The last run may have fewer.

    In GEMM + A2A each block has other columns of b, and the strips of a tile share those. Blocks that take turns do not follow
    one another. adds: own tiles wait for the peers' partials. With a peer's strip above, one would wait for such tiles of the
    peers. Then all resident CTAs might hold one, and those behind them would never begin (rule 4).
    """
    if kind in EXCHANGES or (interleaved and kind not in INBOUND and world > 2):
        return chunks
    return chunks * (max(1, world - 1) if adds else world)


def _units(kind: str, topology: Topology, chunks: int) -> list[Unit]:
    rank, numbers = topology.rank, range(chunks)
    if kind == A2A_GEMM:
        return list(product((rank,), numbers))
    if kind != GATHER:
        return list(product((*targets(topology), rank), numbers))
    near, *far = _by_node((rank, *sources(topology)), topology.local)
    return [*product(near, numbers), *((block, chunk) for node in far for chunk in numbers for block in node)]


def _by_node(blocks: tuple[int, ...], local: int) -> list[tuple[int, ...]]:
    """Blocks in an order that takes one node after the other, node by node."""
    return [blocks[first : first + local] for first in range(0, len(blocks), local)]


def _tiles_of_run(run: list[Unit], strips: Strips) -> Iterator[tuple[Unit, ...]]:
    """The chunks of the strips of each tile."""
    numbered = [unit for unit in run for _ in range(strips.rows)]
    numbered += run[-1:] * (-len(numbered) % strips.parts)
    for first in range(0, len(numbered), strips.parts):
        yield from repeat(tuple(numbered[first : first + strips.parts]), strips.columns)
