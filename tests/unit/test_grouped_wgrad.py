"""Weight gradients of all experts by one kernel: what its warps read, multiply and store, by the descriptors' own numbers; when
it is taken; and that it compiles."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from overlap_train.cache import BoundedCache
from overlap_train.gpu.launch import Launch, entry_of, layout_of
from overlap_train.kernels import hopper_grouped_wgrad as kernels
from overlap_train.ops import grouped_wgrad
from overlap_train.ops.routing import Places
from tests.expert_cases import grouped_gradients
from tests.unit import hopper_ptx
from tests.unit.hopper_model import LANGUAGE, ORDER, Nothing, Word, python_of

SIZES = [(136, 264), (264, 136), (8, 8), (384, 512)]
COUNTS = [(64, 0, 1, 130, 63, 0, 65, 128), (0, 0, 0, 0, 0, 0, 0, 3), (5,) * 9]


class Memory:
    """The ends of experts, as the kernel reads them."""

    def __init__(self, words: Sequence[int], at: int = 0) -> None:
        self.words, self.at = words, at

    def __add__(self, count: int) -> Memory:
        return Memory(self.words, self.at + count)

    def __sub__(self, count: int) -> Memory:
        return self + -count


def _read(place: Any, mask: bool = True, other: int = 0) -> Word:
    return Word(place.words[place.at] if mask else other)


def _panel(desc: Any, rows_at: list[int], memory: torch.Tensor) -> torch.Tensor:
    """What TMA brings for a block at these coordinates: it adds strides up modulo 2**64, and fills up with zeros. The assertions
    are the memory's: nothing outside of it is read."""
    (*_, height, width), (*far, start, col), size = desc.block_shape, rows_at, memory.element_size()
    features, panel = memory.shape[1], torch.zeros(height, width, dtype=memory.dtype)
    assert all(0 <= at < edge for at, edge in zip(far, desc.shape, strict=False)) and start >= 0 and col >= 0
    for row in range(height):
        if start + row < desc.shape[2]:
            coordinates = (*far, start + row, 0)
            nbytes = sum(at * step * size for at, step in zip(coordinates, desc.strides, strict=True)) % 2**64
            row_at, rest = divmod(nbytes, features * size)
            assert rest == 0 and 0 <= row_at < len(memory), "beyond the matrix"
            inside = memory[row_at, col : col + width]
            panel[row, : len(inside)] = inside
    return panel


class Model:
    """The Python of the kernel's warps, one after the other, on one CTA. launch: what the host describes."""

    def __init__(self, launch: Launch, dy: torch.Tensor, x: torch.Tensor, ends: Sequence[int]) -> None:
        self.told, self.ends, self.memory = launch.constants, Memory(ends), {"dy": dy, "x": x}
        self.descs = {name: launch.arguments[f"{name}_desc"] for name in ("dy", "x")}
        self.sizes, self.adds = tuple(launch.arguments[name] for name in ("experts", "n", "k")), self.told["ADDS"]
        n, k = self.sizes[1:]
        self.dws = torch.full((len(ends), n, k), 0.5 if self.adds else torch.nan, dtype=torch.float64)
        self.outbox: dict[tuple[int, int, int], torch.Tensor] = {}
        self.panels: list[list[tuple[str, list[int]]]] = []  # by step
        self.reset: list[tuple[int, int]] = []
        block = {name: SimpleNamespace(nbytes=0) for name in self.descs}
        self._descs = {name: SimpleNamespace(block_type=block[name], name=name) for name in self.descs}
        language = SimpleNamespace(**vars(LANGUAGE) | dict(load=_read, maximum=max, num_programs=lambda axis: 1))
        language.store = lambda place, value: self.reset.append((place.at, value))
        names: dict[str, Any] = dict(gl=language, tile_in_groups=ORDER["tile_in_groups"], RAGGED=kernels.RAGGED.value)
        self._names = names | {"_tile": python_of(kernels._tile, **names)}
        self._blocks = [self.told[name] for name in ("ADDS", "BLOCK_N", "BLOCK_K", "ROWS", "GROUP_N")]

    def run(self) -> torch.Tensor:
        ring, counters, stages = (Nothing(),) * 4, Memory([0, 0]), self.told["STAGES"]
        load = python_of(
            kernels._load, claim_tile=self._claims(), tma_load=self._read, claim=lambda place: 0, **self._names
        )
        load(ring, None, *self._descs.values(), counters, self.ends, self.sizes, *self._blocks, stages)
        for part in (0, 1):
            does = dict(_product=self._product, split_tile=self._halves, put_quarter=self._put, _add=self._add)
            multiply = python_of(kernels._multiply, next_tile=self._claims(), **does, **self._names)
            expert_at = Memory(range(self.sizes[0]))  # instead of addresses
            multiply(None, None, None, expert_at, self.ends, self.sizes, part, *self._blocks, stages)
        store = python_of(kernels._store, next_tile=self._claims(), store_strip=self._store, **self._names)
        store(None, None, None, self.ends, self.sizes, *self._blocks)
        assert not self.outbox and self.reset == [(0, 0), (1, 0)], "all is stored, and the counters are as they were"
        return self.dws

    def _claims(self) -> Callable[..., int]:
        experts, n, k = self.sizes
        tiles = iter([*range(experts * -(-n // self.told["BLOCK_N"]) * -(-k // self.told["BLOCK_K"])), -1])
        return lambda *told: next(tiles)

    def _read(self, desc: Any, at: list[int], full: Any, place: Any) -> None:
        if desc.name == "dy" and (not self.panels or len(self.panels[-1]) == 3):
            self.panels.append([])
        self.panels[-1].append((desc.name, at))

    def _product(self, _: Any, step: int, count: int, part: int, *told: int) -> tuple[torch.Tensor, int]:
        assert count > 0, "else it frees a panel that it has not read"
        acc = torch.zeros(self.told["BLOCK_N"] // 2, self.told["BLOCK_K"], dtype=torch.float64)
        for upper, lower, of_x in self.panels[step : step + count]:
            a, b = (
                _panel(self.descs[name], at, self.memory[name]).double()
                for name, at in ((upper, lower)[part], of_x)
            )  # fmt: skip
            acc += a.t() @ b
        return acc, step + count

    def _halves(self, acc: torch.Tensor, *told: int) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = acc.chunk(2, 1)
        return left, right

    def _box(self, expert: int, row: int, col: int) -> torch.Tensor:
        return self.dws[expert, row : row + self.told["BLOCK_N"] // 2, col : col + self.told["BLOCK_K"] // 2]

    def _add(self, expert: int, values: torch.Tensor, row: int, col: int, sizes: Any) -> None:
        assert sizes == self.sizes
        box = self._box(expert, row, col)
        box += values[: box.shape[0], : box.shape[1]]

    def _put(self, _: Any, turn: int, values: torch.Tensor, part: int, half: int, BUFFERS: int) -> None:
        self.outbox[turn, part, half] = values

    def _store(
        self, _: Any, outbox: Any, turn: int, expert: int, row: int, col: int, halves: int, part: int, BUFFERS: int
    ) -> None:
        for half in range(halves):
            box = self._box(expert, row, col + half * self.told["BLOCK_K"] // 2)
            assert box.isnan().all(), "stored once"
            box[:] = self.outbox.pop((turn, part, half))[: box.shape[0], : box.shape[1]]


class Launches:
    """Stands for a GPU's, and keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def run(self, key: Any, values: tuple[int, ...], describe: Any, *told: Any) -> None:
        assert values == tuple(0 if tensor is None else tensor.data_ptr() for tensor in told)
        self.told.append(told)
        grouped_gradients(*told)


class Experts:
    """Experts on a domain whose device is said to be Hopper's."""

    def __init__(self, counts: Sequence[int], n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> None:
        generator = torch.Generator().manual_seed(n + k)
        rows, starts = sum(counts), [*accumulate(counts, initial=0)]
        self.dy, self.x = (torch.randint(-2, 3, (rows, features), generator=generator).to(dtype) for features in (n, k))
        self.places = Places(starts[:-1], list(counts), None, torch.tensor(starts[1:], dtype=torch.int32))
        self.weights = [torch.nn.Parameter(torch.zeros(n, k, dtype=dtype)) for _ in counts]
        self.launches = Launches()
        self.domain: Any = SimpleNamespace(
            device=torch.device("cpu"), main_grad_addresses=BoundedCache(), launches=self.launches
        )

    def with_main_grads(self) -> Experts:
        for weight in self.weights:
            weight.main_grad = torch.full(weight.shape, 0.5)
        return self

    def expected(self) -> list[torch.Tensor]:
        starts, counts = self.places.starts, self.places.counts
        return [
            self.dy[at : at + count].double().t() @ self.x[at : at + count].double()
            for at, count in zip(starts, counts, strict=True)
        ]

    def gradients(self) -> list[torch.Tensor | None] | None:
        return grouped_wgrad.grouped_gradients(
            self.domain, self.weights, "accumulate", None, self.dy, self.x, self.places
        )


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_warps_read_multiply_and_store_each_element_once_and_nothing_of_others(
    n: int, k: int, counts: tuple[int, ...], adds: bool
) -> None:
    """Experts with and without rows, one panel or several; rows of the last experts are NaN: they reach no other gradient."""
    one = Experts(counts, n, k)
    expected = torch.stack(one.expected())
    for matrix in (one.dy, one.x):
        matrix[one.places.starts[-1] :] = torch.nan
    expected[-1] = torch.nan if counts[-1] else 0.0
    dws = None if adds else one.x.new_empty(len(counts), n, k)
    launch = grouped_wgrad._launch(one.dy, one.x, dws, torch.zeros(2 + len(counts)), one.places.ends)
    found = Model(launch, one.dy, one.x, one.places.ends.tolist()).run()
    torch.testing.assert_close(found, expected + 0.5 * adds, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_wgrad, "tma_reads", lambda device, dtype, n, k: not (n % 8 or k % 8))


@pytest.mark.usefixtures("on_hopper")
def test_gradients_are_returned_or_added_to_main_grad_and_addresses_copied_once() -> None:
    counts = (3, 0, 4, 1, 0, 2, 5, 1)
    for one in (Experts(counts, 16, 8), Experts(counts, 16, 8).with_main_grads()):
        for call in (1, 2):
            gradients = one.gradients()
            assert gradients is not None
            for weight, dw, expected in zip(one.weights, gradients, one.expected(), strict=True):
                if hasattr(weight, "main_grad"):
                    assert dw is None and torch.equal(weight.main_grad.double(), 0.5 + call * expected)
                else:
                    assert dw is not None and dw.dtype == torch.bfloat16 and torch.equal(dw.double(), expected)
        words = [told[3] for told in one.launches.told]
        is_kept = hasattr(one.weights[0], "main_grad")
        assert (words[0] is words[1]) is is_kept and len(one.domain.main_grad_addresses) == is_kept


def _each(one: Experts, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """With another main_grad of each weight."""
    for weight in one.weights:
        weight.main_grad = change(weight.main_grad)


OTHERS: dict[str, Callable[[Experts], object]] = {
    "only one": lambda one: vars(one).update(weights=one.weights[:1]),
    "one has no main_grad": lambda one: delattr(one.weights[3], "main_grad"),
    "two share one": lambda one: setattr(one.weights[3], "main_grad", one.weights[2].main_grad),
    "in 16 bits": lambda one: _each(one, torch.Tensor.bfloat16),
    "columns first": lambda one: _each(one, lambda main_grad: main_grad.t().contiguous().t()),
    "main_grad unaligned": lambda one: setattr(one.weights[0], "main_grad", torch.zeros(16 * 8 + 1)[1:].view(16, 8)),
    "unaligned": lambda one: vars(one).update(x=torch.cat((one.x.flatten()[:1], one.x.flatten()))[1:].view_as(one.x)),
    "apart": lambda one: vars(one).update(dy=torch.cat((one.dy, one.dy), 1)[:, :16]),
    "no rows": lambda one: vars(one).update(dy=one.dy[:0], x=one.x[:0]),
}


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("what", OTHERS)
def test_what_the_kernel_does_not_serve_is_left_alone(what: str) -> None:
    one = Experts((2,) * 9, 16, 8).with_main_grads()
    assert one.gradients() is not None and len(one.launches.told) == 1
    OTHERS[what](one)
    assert one.gradients() is None and len(one.launches.told) == 1


@pytest.mark.usefixtures("on_hopper")
def test_features_that_tma_does_not_read_are_left_alone() -> None:
    for n, k in ((12, 8), (8, 12)):
        assert Experts((2,) * 8, n, k).gradients() is None


def _compiled(adds: bool, dtype: str, divisible: bool) -> tuple[str, int, dict[str, str], hopper_ptx.Resources]:
    binary = hopper_ptx.compiled_wgrad(adds, dtype, divisible)
    ptx = binary.asm["ptx"]
    return ptx, binary.metadata.shared, dict(binary.src.signature), hopper_ptx.resources(ptx)


@pytest.mark.parametrize("divisible", [True, False])
@pytest.mark.parametrize(("adds", "dtype"), [(True, "bf16"), (False, "bf16"), (True, "fp16"), (False, "fp16")])
def test_the_kernel_spills_nothing_and_reads_both_operands_transposed(
    compiling: ProcessPoolExecutor, adds: bool, dtype: str, divisible: bool
) -> None:
    """divisible: features are multiples of 16, which Triton looks at."""
    ptx, shared, signature, said = compiling.submit(_compiled, adds, dtype, divisible).result(120)
    assert [size for _, size in layout_of(signature)] + [8, 8] == entry_of(ptx)[0], (
        "of descriptors with four dimensions, too"
    )
    assert shared <= 232_448 and said.spilled == 0 and not said.serialized
    name = {"bf16": "bf16", "fp16": "f16"}[dtype]
    products = re.findall(rf"wgmma\.mma_async\S+m64n256k16\.f32\.{name}\.{name} .*?, 1, 1, 1, 1;", ptx)
    assert len(products) == 2 * 4, "both operands transposed, of each group 16 rows at once"
    assert len(re.findall(r"red\.relaxed\.gpu\.global\.add\.v4\.f32", ptx)) == 2 * 32 * adds, "128 numbers of a thread"
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.3d\.global\.shared", ptx)) == 2 * 2 * 2 * (not adds)
