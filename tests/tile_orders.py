"""In which order kernels take tiles, from the order of blocks (overlap_train/schedule/order.py): what tests hold them to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, product, repeat

from overlap_train.schedule.kinds import Kind
from overlap_train.schedule.order import Topology, Unit, sources, targets, units_in_run


def tile_order(
    kind: Kind, topology: Topology, chunks: int, tiles: int, interleaved: bool = False
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
    kind: Kind, topology: Topology, chunks: int, strips: Strips, interleaved: bool = False
) -> Iterator[tuple[tuple[int, int, int], tuple[Unit, ...]]]:
    """((block, chunk, number in it), (block, chunk) of each of its parts) of each tile, in the order in which a persistent kernel
    takes them.

    Strips are numbered through the chunks of a run. So a tile's strips may be of two chunks: it belongs to the last one's and
    comes before the others of that. A strip that is missing at the end of a run counts as one of the run's last chunk.
    interleaved: a kernel that stores tiles at the peers takes tiles for all of them in turn; skewed ranks would otherwise hit the
    same destination, halve its ingress bandwidth, and stay skewed.
    """
    units = _units(kind, topology, chunks)
    starts = range(0, len(units), strips.run)
    runs = [list(_tiles_of_run(units[start : start + strips.run], strips)) for start in starts]
    if interleaved:
        *foreign, own = runs
        runs = [[tile for turn in zip(*foreign, strict=True) for tile in turn], own]
    numbers = Counter[Unit]()
    for parts in chain.from_iterable(runs):
        yield (*parts[-1], numbers[parts[-1]]), parts
        numbers[parts[-1]] += 1


def _units(kind: Kind, topology: Topology, chunks: int) -> list[Unit]:
    rank, numbers = topology.rank, range(chunks)
    if kind.sums_blocks:
        return list(product((rank,), numbers))
    if not kind.gathers:
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
