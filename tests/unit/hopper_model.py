"""Runs the Python of the Hopper kernels' loading and storing warps on descriptors that record what TMA would store.

Gluon has no interpreter, but what a tile reads, stores and counts is plain arithmetic: the functions themselves run here, one
warp after the other, and what needs a GPU is replaced by something that does nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isnan
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from overlap_train.kernels import arrivals, hopper_tiles, order, signal, tiles
from overlap_train.kernels import hopper_all_gather_gemm as gather
from overlap_train.kernels import hopper_all_to_all_gemm as receive
from overlap_train.kernels import hopper_gemm_reduce_scatter as scatter
from overlap_train.kernels import hopper_scaled as scaled
from overlap_train.kernels.signal_words import MAX_CHUNKS
from overlap_train.ops.launch import BLOCK_K, BLOCK_M, BLOCK_N, HALF_N, PART_M
from overlap_train.schedule.kinds import Kind
from overlap_train.schedule.order import Topology, units_in_run
from overlap_train.select.tiles import HOPPER_TILE


class Nothing:
    """Does nothing, whatever it is asked for. A MagicMock would note every call: two thirds of the time of these tests."""

    def __getattr__(self, name: str) -> Nothing:
        return self

    def __call__(self, *args: object, **kwargs: object) -> Nothing:
        return self


class Word(int):
    """What is read from memory."""

    dtype = None

    def to(self, dtype: object) -> Word:
        return self


SMS = 132
_BLOCKS = (BLOCK_M, BLOCK_N, BLOCK_K, HOPPER_TILE.group_m)
LANGUAGE = SimpleNamespace(
    cdiv=lambda a, b: -(-a // b), where=lambda condition, a, b: a if condition else b, minimum=min, static_range=range,
    load=lambda *args, **kwargs: Word(), num_programs=lambda axis: SMS, cast=lambda value, dtype: value, int32=None, int64=None,
)  # fmt: skip
NOTHING = dict.fromkeys(("wait_signal", "fence_for_tma", "next_word", "stores_are_written", "mbarrier"), Nothing())
NUMBERS = dict(gl=LANGUAGE, tl=LANGUAGE, NO_TILE=-1, PARTS=2, WARPS=4, WHOLE=-1)


def python_of(function: Any, **names: Any) -> Any:
    """A jitted function as Python runs it, with other values for some of the names that it uses."""
    plain = function.fn
    known = {**plain.__globals__, **NOTHING, **NUMBERS, **names}
    return FunctionType(plain.__code__, known, plain.__name__, plain.__defaults__)


_ORDER = {
    order: ("rank_at", "gather_tile", "received_block", "scatter_unit", "scatter_tile"),
    tiles: (
        "tile_in_groups", "tiles_in_run", "tile_in_run", "strip_in_run", "gather_strip", "tiles_in_scatter", "scatter_pair",
        "scatter_strip", "first_cut", "first_cut_of_scatter", "cut_of_gather", "pieces_below", "cut_of_scatter", "tile_and_side",
        "columns_of",
    ),
}  # fmt: skip
ORDER: dict[str, Any] = {}
for _module, _names in _ORDER.items():
    for _name in _names:
        ORDER[_name] = python_of(getattr(_module, _name), **ORDER)
_COUNTS = ("gathered_units", "received_chunks")
_COUNTING = SimpleNamespace(
    **vars(LANGUAGE) | {"load": lambda words: Word(words[-1]), "maximum": lambda a, b: Word(max(a, b))}
)
ORDER["signal_word"] = lambda source, chunk: source * MAX_CHUNKS + chunk


@dataclass(frozen=True)
class Product:
    """What one rank multiplies: chunks of each block; m_shard, n and k as the kernel is told them. nodes: of the group."""

    world: int
    rank: int
    chunks: int
    m_shard: int
    n: int
    k: int = 64
    nodes: int = 1

    @property
    def topology(self) -> Topology:
        return Topology(self.nodes, self.world // self.nodes, self.rank)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.m_shard, self.n, self.k

    @property
    def m_chunk(self) -> int:
        return self.m_shard // self.chunks

    @property
    def peers(self) -> list[int]:
        """The ranks after this one, and then those before it."""
        return [(self.rank + distance) % self.world for distance in range(1, self.world)]

    def stored(self, blocks: int = 1) -> Stored:
        return Stored(blocks * self.chunks, self.m_chunk, self.n)


@dataclass
class Added:
    """A peer's partials for one tile: the signals waited for, the rows of its two strips, and the first column."""

    waits: set[int]
    rows: tuple[int, int]
    col: int


@dataclass
class Tile:
    """What the loading warp reads for a tile, or for half of one: of each strip the descriptor and first row of a, first column
    of b, how many halves, signals waited for before that, and what is added."""

    descs: tuple[str, str]
    a_rows: tuple[int, int]
    b_col: int
    halves: int
    waits: set[int]
    adds: list[Added] = field(default_factory=list)


class Stored:
    """A descriptor [chunks, rows of a chunk, columns]. times: how often each element was stored; rows, cols: of a and of b, from
    which it was computed."""

    def __init__(self, *shape: int) -> None:
        self.block_type = SimpleNamespace(shape=[1, PART_M, HALF_N])
        self.times, self.rows, self.cols = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))

    def store(self, chunk: int, row: int, col: int, part: int, half: int, tile: Tile) -> None:
        """As TMA does: what lies beyond an edge is left out."""
        assert 0 <= chunk < len(self.times) and row >= 0 and col >= 0
        box = (chunk, slice(row, row + PART_M), slice(col, col + HALF_N))
        rows, cols = self.times[box].shape
        self.times[box] += 1
        self.rows[box] = (tile.a_rows[part] + torch.arange(rows))[:, None]
        self.cols[box] = tile.b_col + half * HALF_N + torch.arange(cols)


_RING = SimpleNamespace(where=LANGUAGE.where, full=Nothing(), BlockedLayout=Nothing(), int32=None)


class Loads:
    """The loading warp's tiles in order. programs: in the launch. here: (source, chunk) of other nodes that have come; None: all.
    ends: how many tiles there were when each launch ended."""

    def __init__(self, programs: int = SMS) -> None:
        self.language = SimpleNamespace(**vars(LANGUAGE) | {"num_programs": lambda axis: programs})
        self.tiles: list[Tile] = []
        self.here: set[tuple[int, int]] | None = None
        self.ends: list[int] = []
        self.claimed = 0
        called = dict(claim_below=self._claim_below(), same_in_warp=lambda index: index)
        self._claim_tile = python_of(hopper_tiles.claim_tile, gl=_RING, QUEUE_DEPTH=2, **called)
        self._waits: set[int] = set()
        self._wait_both = python_of(signal.wait_both, wait_signal=self._wait)

    def names(self) -> dict[str, Any]:
        """What the loading warp calls."""
        names = {name: getattr(self, name) for name in ("claim_tile", "load_tile", "load_halves", "wait_both")}
        return names | {
            "load_tile_or_half": python_of(hopper_tiles.load_tile_or_half, **names),
            "units_to_take": python_of(arrivals.units_to_take, tl=_COUNTING),
        }

    def count(self, p: Product, exchange: bool) -> int:
        """What the kernel before a launch counts."""
        stored = [0]
        language = SimpleNamespace(**vars(_COUNTING) | {"store": lambda words, count: words.append(count)})
        counts = {name: python_of(getattr(arrivals, name), is_here=self._is_here, **ORDER) for name in _COUNTS}
        kernel = python_of(arrivals.count_arrivals_kernel, tl=language, **counts)
        kernel(stored, None, [0], p.rank, p.world, p.topology.local, p.chunks, exchange)
        return stored[-1]

    def _is_here(self, signals: object, source: int, chunk: int, expected: object) -> Word:
        return Word(self.here is None or (source, chunk) in self.here)

    def _claim_below(self) -> Any:
        """The function itself, on one counter for all launches."""

        def exchange(counter: object, expected: int, value: int, **how: str) -> int:
            seen = self.claimed
            self.claimed = value if seen == expected else seen
            return Word(seen)

        def claim(counter: object) -> Word:
            self.claimed += 1
            return Word(self.claimed - 1)

        language = SimpleNamespace(cast=lambda value, dtype: Word(value), int32=None, int64=None, atomic_cas=exchange)
        return python_of(arrivals.claim_below, tl=language, claim=claim)

    def claim_tile(self, rings: object, *claimed: Any) -> int:
        index = self._claim_tile([Nothing()] * 3, *claimed)
        if index == -1:
            self.ends.append(len(self.tiles))
        return index

    def next_tile(self, rings: object, turn: int, warps: int) -> int:
        return turn if turn < len(self.tiles) else -1

    def wait_both(self, signals: object, first: int, last: int, *rest: object) -> None:
        self._wait_both(signals, first, last, *rest)

    def _wait(self, signals: object, word: int, *rest: object) -> None:
        self._waits.add(word)

    def _waited(self) -> set[int]:
        waits, self._waits = self._waits, set()
        return waits

    def load_tile(
        self, panels: object, step: int, upper_desc: str, lower_desc: str, b_desc: str, upper: int, lower: int,
        b_col: int, *rest: int,
    ) -> int:  # fmt: skip
        halves = {"b": 2, "half of b": 1}[b_desc]
        self.tiles.append(Tile((upper_desc, lower_desc), (upper, lower), b_col, halves, self._waited()))
        return step

    def load_halves(
        self, panels: object, step: int, desc: object, upper: int, lower: int, col: int, halves: int, stages: int
    ) -> int:
        assert halves == self.tiles[-1].halves
        self.tiles[-1].adds.append(Added(self._waited(), (upper, lower), col))
        return step


@dataclass
class Scattered:
    """What a scatter did.

    own: own rows. places: staging, or the blocks at rank+1, rank+2, ... counted: strips by signal. goals: counts that make a
    signal. stored: by tile the storing warp's stores, (part,), and counts, (signal, strips), in order. multiplied: by group and
    tile what it did.
    """

    loads: Loads
    own: Stored
    places: list[Stored]
    counted: Counter[int]
    goals: set[int]
    stored: list[list[tuple[int, ...]]]
    multiplied: list[list[list[str]]]


def run_scatter(
    p: Product, direct: bool, exchange: bool, adds: bool = True, gave_up: bool = False, shares: bool = False
) -> Scattered:
    """adds: the kernel adds the peers' partials, unless it exchanges. gave_up: a wait did. shares: sums are sent on."""
    adds, loads = adds and not exchange, Loads(min(SMS, HOPPER_TILE.count(p.m_shard, p.n) * p.world))
    run = units_in_run(Kind.GEMM_A2A if exchange else Kind.GEMM_RS, p.world, p.chunks, direct, adds)
    places = [p.stored() for _ in range(p.world - 1)] if direct else [p.stored(p.world)]
    switches = (p.world, p.topology.local, p.chunks, run, direct, adds)
    python_of(scatter._load, **loads.names(), **ORDER, gl=loads.language)(
        None, None, "a", "b", "half of b", None, None, (p.rank, *[0] * 6), p.sizes, *switches, exchange, *_BLOCKS, 4, True,
    )  # fmt: skip
    done = Scattered(loads, p.stored(), places, Counter(), set(), [], [])
    _store_tiles(done, p, run, direct, shares)
    done.multiplied = [_multiplied(loads, p, part, switches, gave_up) for part in range(2)]
    return done


def _store_tiles(done: Scattered, p: Product, run: int, direct: bool, shares: bool) -> None:
    """The storing warp."""

    def next_tile(rings: object, turn: int, warps: int) -> int:
        done.stored.append([])
        return done.loads.next_tile(rings, turn, warps)

    def store_strip(
        desc: Stored, outbox: object, turn: int, chunk: int, row: int, col: int, halves: int, part: int, buffers: int
    ) -> None:
        assert turn == len(done.stored) - 1 and buffers == (2 if direct else 1)
        tile = done.loads.tiles[turn]
        assert halves == tile.halves
        for half in range(halves):
            desc.store(chunk, row, col + half * HALF_N, part, half, tile)
            done.stored[-1].append((part,))

    def count(counter: int, amount: int) -> None:
        done.counted[counter] += amount
        done.stored[-1].append((counter, amount))

    def notify_peer(counter: int, of_chunk: int, signal: int, word: int, amount: int) -> None:
        count(counter, amount)
        done.goals.add(of_chunk)

    names: dict[str, Any] = dict(next_tile=next_tile, notify_peer=notify_peer, notify_copy_engine=count)
    names |= ORDER | dict(store_strip=store_strip)
    for name in ("_store_strip", "_count"):
        names[name] = python_of(getattr(scatter, name), **names)
    python_of(scatter._store, **names, gl=done.loads.language)(
        None, None, done.places, done.own, Word(), Word(), Word(), 0, p.rank, p.sizes, p.world,
        p.topology.local, p.chunks, run, direct, BLOCK_M, BLOCK_N, HOPPER_TILE.group_m, 2 if direct else 1, shares,
    )  # fmt: skip
    assert done.stored.pop() == []


def _multiplied(loads: Loads, p: Product, part: int, switches: tuple[int, ...], gave_up: bool) -> list[list[str]]:
    """By tile what one multiplying group did."""
    did: list[list[str]] = []

    def began(step: str, cols: int) -> None:
        assert cols == loads.tiles[len(did)].halves * HALF_N
        did.append([step])

    def multiply_tile(
        panels: object, step: int, b: str, steps: int, part: int, rows: int, cols: int, *rest: object
    ) -> tuple[int, int]:
        assert b == ("b" if cols == BLOCK_N else "half of b")
        began("product", cols)
        return 0, step + 1

    def pass_tile(panels: object, step: int, steps: int, rows: int, cols: int, stages: int) -> tuple[int, int]:
        began("no product", cols)
        return 0, step + 1

    def add_half(panels: object, step: int, values: int, *rest: object) -> tuple[int, int]:
        did[-1].append("add")
        return values, step + 1

    def put_quarter(outbox: object, turn: int, values: float, of_part: int, half: int, buffers: int) -> None:
        assert (turn, of_part) == (len(did) - 1, part)
        assert half == sum(step.startswith("put") for step in did[-1]), "left, then right"
        did[-1].append("put NaN" if isnan(values) else "put")

    def plus_bias(values: float, bias: object, col: int, n: int) -> float:
        assert col == loads.tiles[len(did) - 1].b_col + did[-1].count("bias") * HALF_N
        did[-1].append("bias")
        return values

    names = _products(multiply_tile=multiply_tile, pass_tile=pass_tile)
    names |= dict(plus_bias=plus_bias, next_tile=loads.next_tile, add_half=add_half)
    names |= dict(put_quarter=put_quarter, range=range)
    language = SimpleNamespace(**vars(loads.language) | {"load": lambda *args, **kwargs: int(gave_up)})
    python_of(scatter._multiply, **names, **ORDER, gl=language)(
        None, None, None, "b", "half of b", None, None, None, p.rank, p.sizes, (), part, *switches, *_BLOCKS, 4, True, 1, 0,
    )  # fmt: skip
    return did


def _products(**names: Any) -> dict[str, Any]:
    """What multiplying groups call. names: what takes the place of products of tiles."""
    names |= dict(split_tile=lambda *args: (0, 1))
    called = ("scale_of_product", "whole_product", "half_product", "no_whole_product")
    return names | {name: python_of(getattr(scaled, name), **names) for name in called}


def run_gather(p: Product, exchange: bool, arrivals: Iterable[set[tuple[int, int]]] = ()) -> tuple[Loads, Stored]:
    """(what was read, y [M, N] or with exchange [M/W, N], where a tile has as many loads as there are ranks).

    arrivals: what has come from other nodes when a kernel is launched that leaves; then one is launched that does not.
    """
    loads, y = Loads(), p.stored(1 if exchange else p.world)
    load = python_of((receive if exchange else gather)._load, **loads.names(), **ORDER)
    switches = (p.world, p.topology.local, p.chunks, False, *_BLOCKS, 4, True)
    for loads.here in (*arrivals, None):
        leaves = loads.here is not None
        words = (p.rank, *[0] * 7, int(leaves), [loads.count(p, exchange) if leaves else 0])
        load(None, None, "own", "arrived", "b", "half of b", words, p.sizes, *switches)
    _store_products(loads, y, p, exchange)
    return loads, y


def _store_products(loads: Loads, y: Stored, p: Product, exchange: bool) -> None:
    """The multiplying groups, and the storing warp, which takes as many quarters of each as it has put."""
    tiles = loads.tiles[:: p.world] if exchange else loads.tiles  # own blocks; the peers' are of the same rows
    rank, world, local = (0, 1, 1) if exchange else (p.rank, p.world, p.topology.local)
    put: list[list[int]] = []  # by tile of one group

    def next_tile(rings: object, turn: int, warps: int) -> int:
        return turn if turn < len(tiles) else -1

    def multiply_tile(
        panels: object, step: int, desc: object, steps: int, part: int, rows: int, cols: int, *_: int
    ) -> Any:
        assert cols == tiles[len(put)].halves * HALF_N
        put.append([])
        return 0, step

    def put_quarter(outbox: object, turn: int, values: object, part: int, half: int, BUFFERS: int) -> None:
        assert turn == len(put) - 1
        put[-1].append(half)

    def store_strip(
        desc: Stored, outbox: object, turn: int, chunk: int, row: int, col: int, halves: int, part: int, BUFFERS: int
    ) -> None:
        for half in range(halves):
            desc.store(chunk, row, col + half * HALF_N, part, half, tiles[turn])

    def plus_bias(values: int, bias: object, col: int, n: int) -> int:
        assert exchange or col == tiles[len(put) - 1].b_col + len(put[-1]) * HALF_N
        return values

    names = _products(multiply_tile=multiply_tile)
    names |= dict(plus_bias=plus_bias, next_tile=next_tile, put_quarter=put_quarter, store_strip=store_strip)
    for part in range(2):
        put.clear()
        python_of(gather.multiply_tiles, **names, **ORDER)(
            *[None] * 7, rank, p.sizes, (), part, world, local, p.chunks, *_BLOCKS, 4, True, 0,
        )  # fmt: skip
        assert put == [list(range(tile.halves)) for tile in tiles]
    python_of(gather.store_tiles, **names, **ORDER)(
        None, None, y, rank, p.sizes, world, local, p.chunks, BLOCK_M, BLOCK_N, HOPPER_TILE.group_m
    )


def scales_of_tiles(p: Product, scatters: bool, bases: tuple[int, ...]) -> list[tuple[Tile, int, tuple[int, ...]]]:
    """Of each tile and strip where its scales of blocks lie (scales_of_strip), and whether a gather waits for them. bases:
    `scales`, as a kernel has it."""
    loads = run_scatter(p, direct=False, exchange=False).loads if scatters else run_gather(p, exchange=False)[0]
    found: list[tuple[Tile, int, tuple[int, ...]]] = []

    there: list[int] = []  # the number of the panel that was waited for

    def scales_of_strip(*where: Any) -> Any:
        assert scatters or there, "scales of peers' rows are read before these have come"
        return python_of(scaled.scales_of_strip)(*where)

    def half_product(panels: object, step: int, half: object, steps: int, at: Any, part: int, *_: int) -> Any:
        assert scatters or there.pop() == step, "it waited for another panel"
        found.append((loads.tiles[len(found) % len(loads.tiles)], part, at))
        return 0, step + steps

    names: dict[str, Any] = dict(
        half_product=half_product, whole_product=lambda panels, step, b, *rest: (0, *half_product(panels, step, *rest)),
        add_half=lambda panels, step, values, *_: (values, step), plus_bias=lambda values, *_: values,
        next_tile=loads.next_tile, put_quarter=Nothing(),
        wait_for_panel=lambda panels, step, *_: there.append(step), scales_of_strip=scales_of_strip, scale_of_product=Nothing(),
        range=range, gl=loads.language,
    )  # fmt: skip
    run, kernel = units_in_run(Kind.GEMM_RS, p.world, p.chunks, False, True), gather.multiply_tiles
    switches, blocks = (p.world, p.world, p.chunks), (*_BLOCKS, 4, True, scaled.BLOCKS.value)
    if scatters:
        kernel, switches, blocks = scatter._multiply, (*switches, run, False, True), (*blocks[:-1], 1, blocks[-1])
    for part in range(2):
        nothing = [None] * (8 if scatters else 7)
        python_of(kernel, **names, **ORDER)(*nothing, p.rank, p.sizes, bases, part, *switches, *blocks)
    return found
