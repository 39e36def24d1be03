"""The kernels of experts, run as Python on real tables and memory, all ranks of a group one after the other: every row arrives
once where it belongs, with its number; tiles wait for the ranks whose rows they have; each signal is sent once, behind its rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from overlap_train.kernels import hopper_dispatch_gemm as dispatch
from overlap_train.kernels import hopper_experts as experts
from overlap_train.kernels import hopper_gemm_combine as combine
from overlap_train.kernels import signal_words
from overlap_train.kernels.signal_words import MAX_CHUNKS
from overlap_train.ops.expert_tables import Tables, expert_chunks
from overlap_train.ops.grouped import BlockProduct, GroupedProduct, Matrices
from tests.protocol.tables_of_experts import tables_of
from tests.unit.hopper_model import ORDER, python_of

BLOCKS = BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M = 128, 256, 64, 8
# A row is sent in two steps; the second tile of columns has 44, and its right half none.
K, N, STEP, WORD = 5, 300, 4, 77


class Pointer:
    """The elements of a memory at one place, or at several."""

    def __init__(self, memory: torch.Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(
            element_ty=SimpleNamespace(primitive_bitwidth=8 * memory.itemsize), of=memory.dtype
        )

    def __add__(self, places: Any) -> Pointer:
        return Pointer(self.memory, self.at + places)

    def to(self, dtype: Any) -> Pointer:
        memory = self.memory.view(dtype.of)
        return Pointer(memory, self.at * self.memory.itemsize // memory.itemsize)


@dataclass
class Pointers:
    """Some pointers in memory, from one on."""

    memory: list[Any]
    at: Any = 0

    def __add__(self, place: Any) -> Pointers:
        return Pointers(self.memory, self.at + int(place))


def _load(pointer: Any, mask: Any = None) -> Any:
    if mask is None:
        return pointer.memory[pointer.at]
    places, mask = torch.broadcast_tensors(pointer.at, mask)
    found = torch.zeros(places.shape, dtype=pointer.memory.dtype)
    found[mask] = pointer.memory[places[mask]]
    return found


def _store(pointer: Pointer, values: torch.Tensor, mask: torch.Tensor) -> None:
    places, values, mask = torch.broadcast_tensors(pointer.at, values, mask)
    assert (pointer.memory[places[mask]] == EMPTY).all(), "written once"
    pointer.memory[places[mask]] = values[mask].to(pointer.memory.dtype)


EMPTY = -1


def _least(a: Any, b: Any) -> Any:
    return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))


def _most(a: Any, b: Any) -> Any:
    return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))


GL = SimpleNamespace(
    load=_load, store=_store, arange=lambda first, end, layout: torch.arange(first, end), minimum=_least, maximum=_most,
    full=lambda shape, value, dtype: torch.tensor(value, dtype=dtype), expand_dims=lambda values, dim: values.unsqueeze(dim),
    cdiv=lambda a, b: -(-a // b), static_range=range, program_id=lambda axis: 0, where=torch.where, int32=torch.int32,
    int64=torch.int64, multiple_of=lambda pointer, count: pointer, BlockedLayout=lambda *args: None,
    SliceLayout=lambda *args: None, constexpr=int,
)  # fmt: skip
NUMBERS = dict(SLICE=8, SENDERS=2, STORERS=2) | {name: n for name, n in vars(signal_words).items() if name.isupper()}


class Rank:
    """One rank's slot, signals and counters, and what its warps do. rows: of the slot, at most."""

    def __init__(self, tables: Tables, rows: int, features: int) -> None:
        self.tables = tables
        self.slot = torch.zeros(rows * 8 * (features + 1), dtype=torch.uint8)
        self.slot[: rows * 8 * features].view(torch.int64).fill_(EMPTY)
        self.features = features
        self.signals: dict[int, int] = {}
        self.waited: list[int] = []
        self.counted: dict[int, int] = {}

    def prepare(self, rows: int) -> None:
        """Its slot gets so many rows; behind them lie their numbers."""
        self.slot[8 * rows * self.features :][: 4 * rows].view(torch.float32).fill_(EMPTY)

    def rows(self, count: int) -> torch.Tensor:
        return self.slot[: 8 * count * self.features].view(torch.int64).view(count, self.features)

    def numbers(self, count: int) -> torch.Tensor:
        return self.slot[8 * count * self.features :][: 4 * count].view(torch.float32)


class Warps:
    """What the warps of one rank call. group: all ranks; rank: this one."""

    def __init__(self, group: list[Rank], rank: int) -> None:
        self.group, self.rank, self.own = group, rank, group[rank]
        self.claimed = 0
        self.arrived: Callable[[int, int], bool] = lambda target, chunk: True  # whether all that a signal says is there
        self.tiles: list[tuple[int, ...]] = []
        self.known: list[set[int]] = []  # by tile the signals that have been waited for
        slots = Pointers([Pointer(peer.slot) for peer in group])
        signals = Pointers([Words(peer.signals, rank * MAX_CHUNKS) for peer in group])
        self.places = (Words(self.own.counted, 0), slots, signals)

    def names(self, quarter: Any = None) -> dict[str, Any]:
        names: dict[str, Any] = dict(gl=GL, tl=GL, **NUMBERS, tile_in_groups=ORDER["tile_in_groups"])
        names |= dict(claim=self.claim, notify_peer=self.notify_peer, wait_signal=self.wait, load_tile=self.load_tile)
        names |= dict(signal_word=ORDER["signal_word"], next_word=lambda *args: WORD, claim_tile=self.claim_tile)
        names |= dict(next_tile=self.next_tile, take_quarter=self.take_quarter, leave_quarter=lambda *args: None)
        for name in ("tile_of_experts", "strip_at", "_wait_for_rows", "load_experts", "store_rows"):
            names[name] = python_of(getattr(experts, name), **names)
        return names | dict(_send_quarter=python_of(combine._send_quarter, **names))

    def claim(self, counter: object) -> torch.Tensor:
        self.claimed += 1
        return torch.tensor(self.claimed - 1)

    def claim_tile(self, rings: object, turn: int, counter: object, bound: Any) -> int:
        return turn if turn < bound else -1

    def next_tile(self, rings: object, turn: int, warps: int) -> int:
        return turn if turn < len(self.tiles) else -1

    def load_tile(
        self, panels: object, step: int, upper_desc: object, lower_desc: object, b_desc: object, *places: Any
    ) -> int:
        self.tiles.append(tuple(int(place) for place in (*places[:4], places[-1])))
        self.known.append(set(self.own.waited))
        return step

    def take_quarter(self, outbox: object, turn: int, part: int, half: int) -> Any:
        """Whose elements say from which row of a and column of b they come."""
        upper, lower, col, _, matrix = self.tiles[turn]
        rows = (lower if part else upper) + torch.arange(64)
        cols = matrix * N + col + half * 128 + torch.arange(128)
        values = rows[:, None] * 100_000 + cols
        return SimpleNamespace(
            shape=values.shape,
            slice=lambda start, count: SimpleNamespace(load=lambda layout: values[start : start + count]),
        )

    def wait(self, signals: object, word: int, expected: int, *rest: object) -> None:
        assert self.own.signals[int(word)] == expected
        self.own.waited.append(int(word))

    def notify_peer(self, counter: Any, count: Any, signal: Any, word: int, amount: Any = 1) -> None:
        counted = counter.add(int(amount))
        assert counted <= int(count)
        if counted == int(count):
            assert self.arrived(*divmod(counter.at, MAX_CHUNKS)), "its rows are there"
            signal.set(word)


class Words:
    """Words that are counted, or set once."""

    dtype = None

    def __init__(self, words: dict[int, int], at: int) -> None:
        self.words, self.at = words, at

    def __add__(self, place: Any) -> Words:
        return Words(self.words, self.at + int(place))

    def to(self, dtype: object) -> Words:
        return self

    def add(self, amount: int) -> int:
        self.words[self.at] = self.words.get(self.at, 0) + amount
        return self.words[self.at]

    def set(self, word: int) -> None:
        assert self.at not in self.words, "signalled once"
        self.words[self.at] = word


Counts = Any


def any_counts(seed: int) -> Counts:
    """Rows [W, W, E/W] from a rank to another's experts."""
    pick = random.Random(seed)
    world, here = pick.choice([1, 2, 4]), pick.choice([1, 2, 5, 9, 16])
    counts = np.random.default_rng(seed).integers(0, pick.choice([2, 40, 200]), (world, world, here))
    counts[np.random.default_rng(seed + 1).random(counts.shape) < pick.choice([0.0, 0.3, 0.95])] = 0
    return counts


def chunk_of_each(here: int) -> Any:
    """The chunk of each expert of a rank: of one row each, by the pair that it is in."""
    return tables_of(np.ones((1, 1, here)), 0).pairs[1:, 3].numpy()


def group_of(counts: Counts, features: int) -> list[Rank]:
    tables = [tables_of(counts, rank) for rank in range(len(counts))]
    rows = max(counts.sum((0, 2)).max(), counts.sum((1, 2)).max())
    return [Rank(table, int(rows), features) for table in tables]


def placed(counts: Counts, rank: int) -> list[tuple[int, int, int]]:
    """(expert, source, row in the source's sent order) of the rows that a rank's experts get, in placed order."""
    here, found = counts.shape[2], []
    for expert in range(here):
        for turn in range(len(counts)):
            source = (rank - turn) % len(counts)
            first = counts[source].ravel()[: rank * here + expert].sum()
            found += [(expert, source, int(first) + row) for row in range(counts[source, rank, expert])]
    return found


@pytest.mark.parametrize("seed", range(16))
def test_dispatched_rows_arrive_once_and_are_multiplied_where_they_lie(seed: int) -> None:
    counts = any_counts(seed)
    group, world, here = group_of(counts, K), len(counts), counts.shape[2]
    sent = [int(of_rank.sum()) for of_rank in counts]
    order = [torch.randperm(count) for count in sent]  # the token of each row
    for rank, own in enumerate(group):
        own.prepare(int(counts[:, rank].sum()))
    for rank, own in enumerate(group):
        x = torch.arange(sent[rank])[:, None] * 10 + torch.arange(K) + 1_000_000 * rank
        places = torch.randperm(3 * sent[rank])[: sent[rank]]
        numbers = torch.zeros(3 * sent[rank]).index_copy_(0, places, torch.arange(sent[rank]) + 0.5)
        warps = Warps(group, rank)
        warps.arrived = partial(_sent, group, counts, rank)
        python_of(dispatch._send, **warps.names())(
            Pointer(x[torch.argsort(order[rank])].ravel()), Pointer(order[rank]), Pointer(places), Pointer(numbers),
            *(Pointer(each.ravel()) for each in (own.tables.pieces, own.tables.peers)), _sending(warps), WORD, K, STEP,
        )  # fmt: skip
    chunks = range(expert_chunks(here))
    for rank, own in enumerate(group):
        assert own.signals == {source * MAX_CHUNKS + chunk: WORD for source in range(world) for chunk in chunks}
        rows = placed(counts, rank)
        expected = torch.tensor([[1_000_000 * source + 10 * row + col for col in range(K)] for _, source, row in rows])
        assert torch.equal(own.rows(len(rows)), expected.view(len(rows), K))
        assert own.numbers(len(rows)).tolist() == [row + 0.5 for *_, row in rows]
        for b_is_nk in (True, False):
            _multiply_and_store(group, rank, counts, b_is_nk)


def _sent(group: list[Rank], counts: Counts, rank: int, target: int, chunk: int) -> bool:
    """Whether all of this rank's rows of a chunk are at the target, with their numbers."""
    rows, here = placed(counts, target), counts.shape[2]
    chunks = chunk_of_each(here)
    mine = [at for at, (expert, source, _) in enumerate(rows) if source == rank and chunks[expert] == chunk]
    there = group[target]
    return bool((there.rows(len(rows))[mine] != EMPTY).all() and (there.numbers(len(rows))[mine] != EMPTY).all())


def _sending(warps: Warps) -> tuple[Any, ...]:
    return (None, *warps.places)


def _multiply_and_store(group: list[Rank], rank: int, counts: Counts, b_is_nk: bool) -> None:
    own, warps, world, here = group[rank], Warps(group, rank), len(counts), counts.shape[2]
    own.waited.clear()
    matrices = [here + 3 - expert for expert in range(here)]  # where they lie: anywhere
    pairs, rows = Pointer(own.tables.pairs.ravel()), placed(counts, rank)
    segments = Pointer(own.tables.segments.ravel())
    warps.names()["load_experts"](
        None, None, None, None, Pointer(torch.tensor(matrices)), pairs, segments, None, (0, WORD, 0, 0, 0), N, K, world,
        *BLOCKS, 4, b_is_nk, True,
    )  # fmt: skip
    assert len(set(own.waited)) == len(own.waited), "each signal once"
    needed: set[int] = set()
    for tile, (_, first, end, chunk) in enumerate(_tiles(own.tables)):
        needed |= {source * MAX_CHUNKS + chunk for _, source, _ in rows[first : min(first + BLOCK_M, end)]}
        assert warps.known[tile] == needed, "for its own rows, and no others"
    y = torch.full((len(rows) * N,), EMPTY)
    python_of(dispatch._store, **warps.names())(None, None, Pointer(y), pairs, N, BLOCK_M, BLOCK_N, GROUP_M)
    _check_products(y.view(-1, N), [matrices[expert] for expert, *_ in rows], warps)


def _tiles(tables: Tables) -> list[list[int]]:
    """The pair of each tile, in the order in which they are multiplied: two columns of tiles."""
    pairs = tables.pairs[1:].tolist()
    order = (ORDER["tile_in_groups"](index, len(pairs), 2, GROUP_M)[0] for index in range(2 * len(pairs)))
    return [pairs[pair] for pair in order]


def _check_products(y: torch.Tensor, of_rows: list[int], warps: Warps) -> None:
    """Each row comes from its own row of a, and columns one by one from those of its expert's weight."""
    assert (y != EMPTY).all()
    expected = torch.arange(len(of_rows))[:, None] * 100_000 + torch.arange(N)
    expected += torch.tensor(of_rows, dtype=torch.int64)[:, None] * N
    assert torch.equal(y, expected)
    assert {first_k for *_, first_k, _ in warps.tiles} <= {0}
    last = max(len(of_rows), 64)
    assert all(row >= 0 and row + 64 <= last for upper, lower, *_ in warps.tiles for row in (upper, lower))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 2, 3), (0, 1, 1, 2), (2,)])
def test_weights_are_not_copied_wherever_they_lie(order: tuple[int, ...]) -> None:
    """By kernels; the library wants one after the other."""
    memory = torch.arange(4 * 6 * 8.0).view(4, 6, 8)
    weights = [memory[place] for place in order]
    grouped = GroupedProduct(weights, True, SimpleNamespace(stacked=None))
    assert grouped.matrices.lowest.data_ptr() == memory[min(order)].data_ptr()
    assert grouped.matrices.at == tuple(12 * (place - min(order)) for place in order)
    assert torch.equal(grouped.stacked, torch.stack(weights))  # type: ignore[arg-type]
    assert (grouped.stacked.data_ptr() == weights[0].data_ptr()) == (order in ((0, 1, 2, 3), (2,)))  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["not on 16 bytes", "far apart", "transposed"])
def test_weights_that_a_descriptor_does_not_reach_are_put_together(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [*torch.arange(4 * 4 * 8.0).view(4, 4, 8)]
    if how == "not on 16 bytes":
        weights[2] = torch.cat((weights[2].flatten()[:1], weights[2].flatten()))[1:].view(4, 8)
    elif how == "transposed":
        weights[1] = weights[1].t().contiguous().t()
    else:
        monkeypatch.setattr("overlap_train.ops.grouped.MOST_STEPS", 25)
        assert Matrices.of(weights).lowest.data_ptr() == weights[0].data_ptr(), "the last one begins at step 24"
        monkeypatch.setattr("overlap_train.ops.grouped.MOST_STEPS", 24)
    made = Matrices.of(weights)
    assert made.lowest.data_ptr() not in [weight.data_ptr() for weight in weights]
    assert made.at == (0, 8, 16, 24) and torch.equal(
        made.lowest.as_strided((4, 4, 8), (32, 8, 1)), torch.stack(weights)
    )


def test_what_is_kept_of_weights_is_made_anew_where_fp8_comes_or_goes() -> None:
    weights, first = [torch.full((128, 128), value) for value in (1.0, 2.0)], SimpleNamespace(stacked=None)
    for _ in range(2):
        assert torch.equal(GroupedProduct(weights, True, first).stacked, torch.stack(weights))  # type: ignore[arg-type]
        rounded = BlockProduct(SimpleNamespace(on_gpu=False), weights, True, first)  # type: ignore[arg-type]
        assert torch.equal(rounded._of_values.stacked, torch.stack(weights))  # type: ignore[arg-type]


def test_chunks_grow() -> None:
    """The first tiles wait for one expert's rows of 32. There are as many chunks as signals, and none is empty."""
    for here, sizes in ((32, [1, 2, 3, 3, 5, 5, 6, 7]), (9, [1, 1, 1, 1, 1, 1, 1, 2]), (8, [1] * 8), (2, [1, 1])):
        assert np.bincount(chunk_of_each(here)).tolist() == sizes


def _returned(group: list[Rank], counts: Counts, rank: int, with_numbers: bool, target: int, chunk: int) -> bool:
    """Whether all rows of the target's tokens that this rank's experts have are back, with their numbers."""
    mine = [row for _, source, row in placed(counts, rank) if source == target]
    there, count = group[target], int(counts[target].sum())
    has_numbers = not with_numbers or bool((there.numbers(count)[mine] != EMPTY).all())
    return chunk == 0 and has_numbers and bool((there.rows(count)[mine] != EMPTY).all())


@pytest.mark.parametrize("with_numbers", [False, True])
@pytest.mark.parametrize("seed", range(16))
def test_finished_rows_go_back_to_where_they_came_from(seed: int, with_numbers: bool) -> None:
    counts = any_counts(seed)
    group, world = group_of(counts, N), len(counts)
    for rank, own in enumerate(group):
        own.prepare(int(counts[rank].sum()))
    for rank, own in enumerate(group):
        warps, rows = Warps(group, rank), placed(counts, rank)
        warps.arrived = partial(_returned, group, counts, rank, with_numbers)
        pairs, segments, peers = (
            Pointer(each.ravel()) for each in (own.tables.pairs, own.tables.segments, own.tables.peers)
        )
        in_order = Pointer(torch.arange(counts.shape[2]))
        warps.names()["load_experts"](
            None, None, None, None, in_order, pairs, segments, None, None, N, K, world, *BLOCKS, 4, True, False
        )
        numbers = Pointer(torch.arange(len(rows)) + 1000.0 * rank) if with_numbers else None
        python_of(combine._send, **warps.names())(
            None, None, Pointer(torch.zeros(1, dtype=torch.int64)), numbers, pairs, segments, peers, warps.places,
            Pointer(torch.zeros(1)), 0, N, world, BLOCK_M, BLOCK_N, GROUP_M,
        )  # fmt: skip
    for rank, own in enumerate(group):
        assert own.signals == {source * MAX_CHUNKS: WORD for source in range(world)}
        rows = torch.full((int(counts[rank].sum()), 2), EMPTY)
        for source in range(world):
            for place, (expert, of_rank, row) in enumerate(placed(counts, source)):
                if of_rank == rank:
                    rows[row] = torch.tensor([place * 100_000 + expert * N, 1000 * source + place])
        assert torch.equal(own.rows(len(rows)), rows[:, :1] + torch.arange(N))
        assert not with_numbers or torch.equal(own.numbers(len(rows)), rows[:, 1].float())


def test_scales_of_rows_are_read_once_these_have_come() -> None:
    """Of two tiles, behind their first panels, 0 and 3."""
    order: list[Any] = []
    tiles = iter((0, 1, experts.NO_TILE))

    def product_of(panels: object, step: int, *told: object) -> tuple[int, int, int]:
        order.append("product")
        return 0, 0, step + 3

    names = dict(
        next_tile=lambda *told: next(tiles), tile_of_experts=lambda *told: (0, 0, BLOCK_M, 0, 0), strip_at=lambda *told: 0,
        wait_for_panel=lambda panels, step, *told: order.append(step), scales_of_strip=lambda *told: order.append("scales"),
        whole_product=product_of, put_quarter=lambda *told, **more: None,
        gl=SimpleNamespace(cdiv=lambda *told: 1, load=lambda *told, **more: 0),
    )  # fmt: skip
    python_of(experts.multiply_experts, **(ORDER | names))(
        *[None] * 5, (0, 0, 0), None, None, N, K, 0, *BLOCKS, 4, True, experts.BLOCKS
    )
    assert order == [0, "scales", "product", 3, "scales", "product"]


def _late_stores() -> Any:
    """Each store is made when the next one begins."""
    waiting: list[tuple[Any, ...]] = []

    def store(pointer: Pointer, values: torch.Tensor, mask: torch.Tensor) -> None:
        for one in waiting:
            _store(*one)
        waiting[:] = [(pointer, values, mask)]

    return patch.object(GL, "store", store)


_add = Words.add
FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "signals before rows": (_late_stores, "its rows are there"),
    "no wait for rows": (lambda: patch.object(Warps, "wait", lambda *told: None), "for its own rows"),
    "rows counted twice": (lambda: patch.object(Words, "add", lambda self, amount: _add(self, 2 * amount)), "there|<="),
    "a chunk without a signal": (lambda: patch.object(Words, "set", lambda *told: None), "77"),
}


@pytest.mark.parametrize(
    ("fault", "back"), [(fault, back) for fault in FAULTS for back in (False, True) if not (back and "wait" in fault)]
)
def test_planted_faults_are_found(fault: str, back: bool) -> None:
    """back: of the kernel that sends finished rows back, which waits for nobody."""
    plant, said = FAULTS[fault]
    with plant(), pytest.raises(AssertionError, match=said):
        _all_seeds(back)


def _all_seeds(back: bool) -> None:
    for seed in range(16):  # whichever shows it
        if back:
            test_finished_rows_go_back_to_where_they_came_from(seed, True)
        else:
            test_dispatched_rows_arrive_once_and_are_multiplied_where_they_lie(seed)
