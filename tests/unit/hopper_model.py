"""Runs the Python of the Hopper kernels' loading and storing warps on descriptors that record what TMA would store.

Gluon has no interpreter, but what a tile reads, stores and counts is plain arithmetic: the functions themselves run here, one
warp after the other, and what needs a GPU is replaced by something that does nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from overlap_train.kernels import hopper_all_gather_gemm as gather
from overlap_train.kernels import hopper_all_to_all_gemm as receive
from overlap_train.kernels import hopper_gemm_reduce_scatter as scatter
from overlap_train.kernels import hopper_tiles, tiles
from overlap_train.kernels.signal_words import MAX_CHUNKS
from overlap_train.operators.hopper import BLOCK_K, BLOCK_M, BLOCK_N, HALF_N, PART_M
from overlap_train.planning.tiling import HOPPER_TILE


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
    load=lambda *args, **kwargs: Word(), num_programs=lambda axis: SMS,
)  # fmt: skip
NOTHING = dict.fromkeys(("wait_signal", "fence_for_tma", "next_word", "stores_are_written", "mbarrier"), Nothing())
NUMBERS = dict(gl=LANGUAGE, tl=LANGUAGE, NO_TILE=-1, PARTS=2, WARPS=4, WHOLE=-1)


def python_of(function: Any, **names: Any) -> Any:
    """A jitted function as Python runs it, with other values for some of the names that it uses."""
    plain = function.fn
    return FunctionType(plain.__code__, {**plain.__globals__, **NOTHING, **NUMBERS, **names}, plain.__name__)


_ORDER = ("gather_tile", "scatter_tile", "tile_in_block", "first_cut", "tile_and_side")
ORDER = {name: python_of(getattr(tiles, name)) for name in _ORDER}
ORDER["signal_word"] = lambda source, chunk: source * MAX_CHUNKS + chunk


@dataclass(frozen=True)
class Product:
    """What one rank multiplies: chunks of each block; m_shard, n and k as the kernel is told them."""

    world: int
    rank: int
    chunks: int
    m_shard: int
    n: int
    k: int = 64

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.m_shard, self.n, self.k

    def stored(self, blocks: int = 1) -> Stored:
        return Stored(blocks * self.chunks, self.m_shard // self.chunks, self.n)


@dataclass
class Tile:
    """What the loading warp reads for one: from which descriptor, first row of a and first column of b, and what is added."""

    a_desc: str
    a_row: int
    b_col: int
    adds: list[tuple[int, int]] = field(default_factory=list)


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
        self.rows[box] = (tile.a_row + part * PART_M + torch.arange(rows))[:, None]
        self.cols[box] = tile.b_col + half * HALF_N + torch.arange(cols)


class Loads:
    """The loading warp's tiles in order."""

    def __init__(self) -> None:
        self.tiles: list[Tile] = []

    def claim_tile(self, rings: object, turn: int, counter: object, total: int) -> int:
        return turn if turn < total else -1

    def next_tile(self, rings: object, turn: int, warps: int) -> int:
        return turn if turn < len(self.tiles) else -1

    def load_tile(
        self, panels: object, step: int, a_desc: str, b_desc: object, a_row: int, b_col: int, *rest: int
    ) -> int:
        self.tiles.append(Tile(a_desc, a_row, b_col))
        return step

    def load_halves(self, panels: object, step: int, desc: object, row: int, col: int, stages: int) -> int:
        self.tiles[-1].adds.append((row, col))
        return step


def run_scatter(p: Product, direct: bool, exchange: bool) -> tuple[Loads, Stored, list[Stored], Counter[int], set[int]]:
    """(what was read, own rows, staging or the blocks at rank+1, rank+2, ..., tiles by signal, counts that make a signal)."""
    loads, own, counted, goals = Loads(), p.stored(), Counter[int](), set[int]()
    places = [p.stored() for _ in range(p.world - 1)] if direct else [p.stored(p.world)]
    claims = dict(claim_tile=loads.claim_tile, load_tile=loads.load_tile, load_halves=loads.load_halves)
    switches = (p.world, p.chunks, direct, not exchange, exchange)
    python_of(scatter._load, **claims, **ORDER)(
        None, None, "a", None, None, None, (p.rank, *[0] * 6), p.sizes, *switches, *_BLOCKS, 4, True
    )

    stores = iter((tile, part, half) for tile in loads.tiles for part in range(2) for half in range(2))

    def store_inside(desc: Stored, quarter: object, chunk: int, row: int, col: int) -> None:
        tile, part, half = next(stores)  # as they lie in the outbox
        desc.store(chunk, row, col, part, half, tile)

    def notify_peer(counter: int, count: int, signal: int, word: int) -> None:
        counted[counter] += 1
        goals.add(count)

    quarters = python_of(hopper_tiles.store_quarters, store_inside=store_inside, tma=Nothing())
    names = dict(next_tile=loads.next_tile, store_quarters=quarters, notify_peer=notify_peer)
    names |= dict(notify_copy_engine=lambda counter: counted.update([counter]))
    python_of(scatter._store, **names, **ORDER)(
        None, [Nothing()] * 3, places, own, Word(), Word(), Word(), 0, p.rank, p.sizes, p.world, p.chunks, direct,
        BLOCK_M, BLOCK_N, HOPPER_TILE.group_m, 2 if direct else 1,
    )  # fmt: skip
    assert next(stores, None) is None
    return loads, own, places, counted, goals


def run_gather(p: Product, exchange: bool) -> tuple[Loads, Stored]:
    """(what was read, y [M, N] or with exchange [M/W, N])."""
    loads, y = Loads(), p.stored(1 if exchange else p.world)
    names: dict[str, Any] = dict(claim_tile=loads.claim_tile, load_tile=loads.load_tile)
    names["load_tile_or_half"] = python_of(gather.load_tile_or_half, **names)
    python_of((receive if exchange else gather)._load, **names, **ORDER)(
        None,
        None,
        "own",
        "arrived",
        None,
        None,
        (p.rank, *[0] * 7),
        p.sizes,
        p.world,
        p.chunks,
        False,
        *_BLOCKS,
        4,
        True,
    )
    if exchange:  # a tile has as many loads as there are blocks, all of the same place in them
        loads.tiles = loads.tiles[:: p.world]
    for part in range(2):
        _store_products(loads, y, p, part, exchange)
    return loads, y


def _store_products(loads: Loads, y: Stored, p: Product, part: int, exchange: bool) -> None:
    """One multiplying group's stores."""
    tiles_left, quarters_left = iter(loads.tiles), list[Tile]()

    def multiply_tile(
        panels: object, step: int, desc: object, steps: int, part: int, rows: int, cols: int, *_: int
    ) -> Any:
        quarters_left.extend([next(tiles_left)] * (cols // HALF_N))  # of a half tile one, of a whole one two
        return 0, step

    def store_quarter(desc: Stored, part: int, half: int, chunk: int, row: int, col: int) -> None:
        desc.store(chunk, row, col, part, half, quarters_left.pop())

    names = dict(next_tile=loads.next_tile, multiply_tile=multiply_tile, store_quarter=store_quarter, tma=Nothing())
    names |= dict(split_tile=lambda *args: (0, 1), _unless_aborted=lambda acc, abort: acc)
    buffers, (rank, world) = SimpleNamespace(index=lambda place: place), (0, 1) if exchange else (p.rank, p.world)
    python_of(gather.multiply_tiles, **names, **ORDER)(
        None, None, None, None, y, buffers, rank, None, p.sizes, part, world, p.chunks, *_BLOCKS, 4, True
    )
    assert next(tiles_left, None) is None and not quarters_left
