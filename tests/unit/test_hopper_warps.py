"""GEMM + RS on Hopper: the warps of all CTAs end in any order, with tiles that have a peer's strip and an own one, too.

What each warp does with a tile is what its Python did (hopper_model.py). Here it waits as on a GPU: for panels of the ring, for
tile indices, for buffers of the outbox, and for the signals of the peers.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("triton")

from overlap_train.kernels.signal_words import MAX_CHUNKS
from overlap_train.select.tiles import HOPPER_TILE
from tests.unit.hopper_model import Product, Scattered, at_outbox, run_scatter

STAGES, QUEUE_DEPTH, PARTS = 4, 2, 2
Steps = Iterator[Callable[[], bool]]  # a warp, up to what it waits for next
# (rows of a rank, chunks, tiles' columns): strips a chunk 1, 2, 3, 3 and 1; where they are odd, tiles cross
CASES = [(64, 1, 2), (65, 1, 1), (190, 1, 2), (380, 2, 1), (128, 2, 1)]


class Rank:
    """What the warps of one rank's CTAs share."""

    def __init__(self, product: Product, direct: bool) -> None:
        self.done: Scattered = run_scatter(product, direct, exchange=False)
        self.claims = iter(range(len(self.done.loads.tiles)))
        self.counted: Counter[int] = Counter()
        self.arrived: set[int] = set()

    def has(self, signals: set[int]) -> bool:
        return signals <= self.arrived

    def panels(self, tile: int) -> list[set[int]]:
        """By panel of a tile the signals that are waited for before it is loaded: the operands', then halves of each peer."""
        loaded = self.done.loads.tiles[tile]
        return [set(), *(waits for added in loaded.adds for waits in (added.waits, set())[: loaded.halves])]


class Cta:
    """Counts what has gone through its rings since the kernel began."""

    def __init__(self, buffers: int) -> None:
        self.tiles: list[int | None] = []
        self.read = [0] * (PARTS + 1)  # indices, by both multiplying groups and the storing warp
        self.filled, self.freed = 0, [0] * PARTS
        self.buffers = buffers
        self.phases: Counter[tuple[str, int]] = Counter()  # of the outbox's barriers, that are over
        self.held: dict[
            int, tuple[int, int, int]
        ] = {}  # by buffer of the outbox: tile, part and half of the quarter in it

    def may_claim(self) -> bool:
        return len(self.tiles) < min(self.read) + QUEUE_DEPTH

    def may_fill(self) -> bool:
        return self.filled < min(self.freed) + STAGES

    def may_read(self, reader: int) -> bool:
        return len(self.tiles) > self.read[reader]

    def may_multiply(self, part: int) -> bool:
        return self.filled > self.freed[part]

    def is_over(self, barrier: tuple[str, int], parity: int) -> bool:
        """As the GPU tells: of a barrier it knows only whether the phase that runs is odd."""
        return self.phases[barrier] % 2 != parity

    def at_outbox(self, events: list[tuple[Any, ...]], quarter: tuple[int, int, int]) -> Steps:
        """Puts a quarter into the outbox, or takes it out. What has not left is not overwritten, and nothing else is taken."""
        for event, what, *parity in events:
            if event == "wait":
                yield partial(self.is_over, what, *parity)
            elif event == "arrive":
                self.phases[what] += 1
            elif event == "write":
                assert what not in self.held, f"{self.held[what]} is overwritten by {quarter}"
                self.held[what] = quarter
            else:
                assert self.held.pop(what) == quarter

    def indices(self, reader: int) -> Iterator[Callable[[], bool] | int]:
        """What a reader of tile indices waits for, and each index, in turn."""
        while True:
            yield partial(self.may_read, reader)
            tile = self.tiles[self.read[reader]]
            self.read[reader] += 1
            if tile is None:
                return
            yield tile


@functools.cache
def put_events(turn: int, part: int, half: int, buffers: int) -> list[tuple[Any, ...]]:
    return at_outbox("put_quarter", turn, part, half, buffers)


@functools.cache
def store_events(turn: int, part: int, half: int, buffers: int) -> list[tuple[Any, ...]]:
    """Of one half of a strip: a wait, a read and an arrival."""
    return at_outbox("store_strip", turn, half + 1, part, buffers)[3 * half :]


def load(rank: Rank, cta: Cta) -> Steps:
    while not cta.tiles or cta.tiles[-1] is not None:
        yield cta.may_claim
        cta.tiles.append(next(rank.claims, None))
        for signals in rank.panels(cta.tiles[-1]) if cta.tiles[-1] is not None else ():
            yield partial(rank.has, signals)
            yield cta.may_fill
            cta.filled += 1


def multiply(rank: Rank, cta: Cta, part: int) -> Steps:
    for tile in cta.indices(part):
        if callable(tile):
            yield tile
            continue
        turn, half = cta.read[part] - 1, 0
        for step in rank.done.multiplied[part][tile]:
            if step == "put":
                yield from cta.at_outbox(put_events(turn, part, half, cta.buffers), (turn, part, half))
                half += 1
            else:
                yield partial(cta.may_multiply, part)
                cta.freed[part] += 1


def store(ranks: list[Rank], number: int, cta: Cta, goal: int) -> Steps:
    mine = ranks[number]
    for tile in cta.indices(PARTS):
        if callable(tile):
            yield tile
            continue
        turn, halves = cta.read[PARTS] - 1, [0] * PARTS
        for part, *strips in mine.done.stored[tile]:
            if not strips:
                half = halves[part]
                yield from cta.at_outbox(store_events(turn, part, half, cta.buffers), (turn, part, half))
                halves[part] += 1
                continue
            mine.counted[part] += strips[0]  # part: the signal
            if mine.counted[part] == goal:
                target, chunk = divmod(part, MAX_CHUNKS)
                ranks[target].arrived.add(number * MAX_CHUNKS + chunk)


def run(warps: list[Steps], seed: int) -> None:
    """Until all have ended; of those that may go on a random one does."""
    chosen = random.Random(seed)
    waits = {warp: next(warp, None) for warp in warps}
    while waits := {warp: wait for warp, wait in waits.items() if wait is not None}:
        ready = [warp for warp, wait in waits.items() if wait()]
        assert ready, f"seed {seed}: every warp waits"
        warp = chosen.choice(ready)
        waits[warp] = next(warp, None)


@pytest.mark.parametrize("ctas", [1, 3])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("m_shard", "chunks", "columns"), CASES)
def test_every_warp_ends_in_any_order(
    m_shard: int, chunks: int, columns: int, world: int, direct: bool, ctas: int
) -> None:
    for seed in range(10):
        run_grid([Product(world, rank, chunks, m_shard, 256 * columns) for rank in range(world)], direct, ctas, seed)


@pytest.mark.parametrize("direct", [False, True])
def test_every_warp_ends_where_the_last_wave_is_cut(direct: bool) -> None:
    """Into halves, of the last 12 of 144 tiles."""
    products = [Product(2, rank, 1, 1088, 8 * 256) for rank in range(2)]
    for ctas in (1, 3):
        ranks = run_grid(products, direct, ctas, seed=ctas)
        for rank in ranks:
            assert [tile.halves for tile in rank.done.loads.tiles].count(1) == 2 * 12


def run_grid(products: list[Product], direct: bool, ctas: int, seed: int) -> list[Rank]:
    """So many CTAs of each rank, in a random order."""
    p = products[0]
    goal = HOPPER_TILE.counted(p.m_shard // p.chunks, p.n)
    ranks = [Rank(product, direct) for product in products]
    grid = [(number, Cta(2 if direct else 1)) for number in range(p.world) for _ in range(ctas)]
    warps = [load(ranks[number], cta) for number, cta in grid]
    warps += [multiply(ranks[number], cta, part) for number, cta in grid for part in range(PARTS)]
    warps += [store(ranks, number, cta, goal) for number, cta in grid]
    run(warps, seed)
    for number, cta in grid:
        assert cta.freed == [cta.filled] * PARTS and not cta.held, "nothing is left in the rings"
        assert len(ranks[number].arrived) == (p.world - 1) * p.chunks
    return ranks
