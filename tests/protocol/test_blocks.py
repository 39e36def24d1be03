"""e4m3 with a scale for each block: torch's and the interpreted kernels' against the formula in plain numpy, to the bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from overlap_train.gpu.launch import LaunchCache
from overlap_train.ops import blocks
from overlap_train.ops.product import BlockMatrix
from overlap_train.ops.quantize import Fp8Copies
from overlap_train.select.method import packed_bytes
from tests.protocol.test_quantize import keeps_its_exponent

CPU: Any = SimpleNamespace(on_gpu=False)
INTERPRETED: Any = SimpleNamespace(on_gpu=True, device=None, launches=LaunchCache(None, 0))


def by_formula(x: torch.Tensor, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(what x [M, K] is in e4m3 with a scale for each block of height x width, before it is divided by that; those scales)."""
    v, (m, k) = x.float().double().numpy(), x.shape
    scales = np.empty((m // height, k // width))
    for i, j in np.ndindex(*scales.shape):
        block = np.abs(v[i * height : (i + 1) * height, j * width : (j + 1) * width])
        amax = np.float32(np.nanmax(block, initial=0.0))
        if amax == 0 or np.isinf(amax):
            scales[i, j] = 1.0
        else:
            with np.errstate(over="ignore"):
                ratio = min(np.float32(448) / amax, np.finfo(np.float32).max)
            scales[i, j] = 2.0 ** (np.frexp(ratio)[1] - 1)
    v = v * scales.repeat(height, 0).repeat(width, 1)
    exponent = np.frexp(np.nan_to_num(v, posinf=448, neginf=-448))[1]
    step = 2.0 ** (np.maximum(exponent, -5) - 4)  # three bits behind the first; the least normal number is 2^-6
    return np.clip(np.rint(v / step) * step, -448, 448), scales


def matrix(m: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of many sizes, blocks of zeros, and in the last two blocks what is no number, infinite, or nearly nothing."""
    random = torch.Generator().manual_seed(m + k)
    x = torch.randn(m, k, generator=random) * torch.randn(m, k // 32, generator=random).mul(6).exp().repeat_interleave(
        32, 1
    )
    x[:, :128] *= 2.0 ** -torch.arange(m)[:, None]
    x[5, :256], x[7, -128:] = 0.0, torch.nan
    x[m - 128, :3] = torch.tensor([7.0, torch.inf, torch.nan])
    x[m - 127] = torch.tensor([1e-45, 1e-38, 448.0, 3e38]).repeat(k // 4)
    return x.to(dtype)


def same(found: torch.Tensor, numbers: np.ndarray) -> bool:
    return bool(np.array_equal(found.float().numpy(), numbers.astype(np.float32), equal_nan=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("m", "k"), [(256, 384), (128, 128), (384, 640)])
def test_pieces_and_squares_are_the_formulas(m: int, k: int, dtype: torch.dtype) -> None:
    x = matrix(m, k, dtype)
    (rows, scales), (columns, column_scales) = by_formula(x, 1, 128), by_formula(x, 128, 1)
    packed, other, apart = blocks.new_packed(x), blocks.new_packed(x), blocks.new_columns(x)
    blocks.write_pieces(CPU, x, packed, other)
    blocks.write_pieces(CPU, x, None, apart)
    assert packed.shape[1] % 16 == 0 and packed.shape[1] >= k + k // 32
    assert same(packed[:, :k], rows) and same(blocks.tails(packed, k), 1 / scales)
    assert same(apart.numbers, columns.T) and same(apart.inverse, 1 / column_scales)
    again = blocks.columns_of(CPU, other, k)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(apart, again, strict=True))
    w8, (numbers, scales) = blocks.squares(CPU, x, True, True), by_formula(x, 128, 128)
    assert w8.rows is not None and w8.columns is not None and w8.inverse_of_columns is not None
    assert same(w8.rows, numbers) and same(w8.columns, numbers.T)
    assert same(w8.inverse[:, : k // 128], 1 / scales) and same(w8.inverse_of_columns[:, : m // 128], 1 / scales.T)
    assert w8.inverse.shape[1] % 4 == w8.inverse_of_columns.shape[1] % 4 == 0


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("m", [0, 1, 37, 128])
def test_packed_rows_of_any_number_stand_for_what_they_round(m: int) -> None:
    random = torch.Generator().manual_seed(m)
    numbers, scales = by_formula(rounded := torch.randn(m, 256, generator=random), 1, 128)
    packed = blocks.packed_rows(CPU, rounded)
    assert same(packed.view(torch.float8_e4m3fn)[:, :256], numbers) and same(blocks.tails(packed, 256), 1 / scales)
    # Exact in e4m3: the interpreter rounds otherwise.
    x = torch.randint(-15, 16, (m, 2, 128), generator=random) * 2.0 ** torch.randint(-9, 9, (m, 2, 1), generator=random)
    for domain in (CPU, INTERPRETED):
        packed = blocks.packed_rows(domain, x.view(m, 256))
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(blocks.unpacked_rows(domain, packed, 256, dtype), x.view(m, 256).to(dtype))


@pytest.mark.parametrize(("n", "k"), [(128, 256), (384, 128)])
def test_squares_of_each_expert_are_its_own(n: int, k: int) -> None:
    stack = torch.randint(-15, 16, (3, n, k), generator=torch.Generator().manual_seed(n)).float()
    for domain in (CPU, INTERPRETED):
        made, ones = (
            blocks.squares(domain, stack.flatten(0, 1), True, True, n),
            [blocks.squares(domain, w, True, True) for w in stack],
        )
        for name, found in made._asdict().items():
            expected = torch.cat([getattr(one, name) for one in ones])
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), name


@pytest.mark.parametrize(("m", "k"), [(256, 384), (128, 128)])
def test_the_kernels_are_torchs(m: int, k: int) -> None:
    x, strange = torch.randn(m, k, generator=torch.Generator().manual_seed(m)), matrix(m, k)
    for value in (x, strange):
        outputs = []
        for domain in (CPU, INTERPRETED):
            both, apart, width = blocks.new_packed(value, twice=True), blocks.new_columns(value), packed_bytes(k)
            blocks.write_pieces(domain, value, both[:, :width], both[:, width:])
            rows = [blocks.new_rows(value, ranks) for ranks in (1, m // 128)]
            blocks.write_pieces(domain, value, None, apart)
            blocks.write_pieces(domain, value, rows[0], None)
            blocks.write_pieces(domain, value, rows[1], blocks.new_columns(value))
            of_all = rows[1].inverse.view(-1, k // 128, 128).transpose(0, 1).reshape(k // 128, m)
            assert torch.equal(rows[0].inverse, of_all) and torch.equal(of_all.t(), blocks.tails(both, k))
            assert all(torch.equal(one.numbers.view(torch.uint8), both[:, :k].view(torch.uint8)) for one in rows)
            gathered = blocks.columns_of(domain, both[:, width:], k)
            w8 = blocks.squares(domain, value, True, True)
            packed = both[:, :k], both[:, width : width + k]
            numbers = (*packed, apart.numbers.t(), gathered.numbers.t(), w8.rows, w8.columns.t())  # type: ignore[union-attr]
            inverse = [blocks.tails(both, k), apart.inverse, gathered.inverse, w8.inverse, w8.inverse_of_columns]
            outputs.append((numbers, inverse))
        (right, right_inverse), (made, made_inverse) = outputs
        assert all(torch.equal(*pair) for pair in zip(right_inverse, made_inverse, strict=True))  # type: ignore[arg-type]
        if value is strange:  # the interpreter's rounding is not the GPU's (keeps_its_exponent)
            continue
        of_rows, of_columns = (right_inverse[place].repeat_interleave(128, 1 - place) for place in (0, 1))
        of_w = right_inverse[3].repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :k]  # type: ignore[union-attr]
        scales = (of_rows, of_columns, of_columns, of_columns, of_w, of_w)
        for a, b, inverse in zip(right, made, scales, strict=True):
            kept = keeps_its_exponent(value / inverse, a)  # type: ignore[arg-type]
            assert bool(((a.float() == b.float()) | ~kept).all()) and kept.float().mean() > 0.8  # type: ignore[union-attr]


def test_products_are_those_of_the_numbers() -> None:
    """With squares on the right, and with pieces on both sides, of odd counts of blocks; packed rows alone or side by side."""
    x, w, dy = matrix(256, 640).nan_to_num(1.0, 1.0, 1.0), torch.randn(384, 640), torch.randn(256, 384)
    x = x.clamp(-100, 100)
    both, width = blocks.new_packed(x, twice=True), packed_bytes(640)
    blocks.write_pieces(CPU, x, both[:, :width], both[:, width:])
    w8 = blocks.squares(CPU, w, True, True)
    by_rows, of_w = (by_formula(one, height, 128) for one, height in ((x, 1), (w, 128)))
    x_rows = by_rows[0] / by_rows[1].repeat(128, 1)
    w_rows = of_w[0] / of_w[1].repeat(128, 0).repeat(128, 1)
    assert w8.rows is not None and w8.columns is not None and w8.inverse_of_columns is not None
    y = BlockMatrix(w8.rows, w8.inverse, torch.float32).multiply(both)
    assert np.abs(y.numpy() - x_rows @ w_rows.T).max() < 1e-5 * np.abs(x_rows @ w_rows.T).max()
    dy8, columns = blocks.new_rows(dy, 2), blocks.new_columns(dy)
    blocks.write_pieces(CPU, dy, dy8, columns)
    dy_rows, dy_columns, x_columns = by_formula(dy, 1, 128), by_formula(dy, 128, 1), by_formula(x, 128, 1)
    right, dx = BlockMatrix(w8.columns, w8.inverse_of_columns, torch.float32, dy8.inverse), torch.empty(256, 640)
    for rank, (numbers, out) in enumerate(zip(dy8.numbers.chunk(2), dx.chunk(2), strict=True)):
        inverse = right.of_rank(rank).a_inverse
        assert inverse is not None and inverse.t().stride() == (1, 128), "as cuBLASLt takes it"
        right.of_rank(rank).multiply(numbers, out)
    expected = dy_rows[0] / dy_rows[1].repeat(128, 1) @ w_rows
    assert np.abs(dx.numpy() - expected).max() < 1e-5 * np.abs(expected).max()
    x8 = blocks.columns_of(CPU, both[:, width:], 640)
    dw = BlockMatrix(x8.numbers, x8.inverse, torch.float32, columns.inverse, in_pieces=True).multiply(columns.numbers)
    expected = (dy_columns[0] / dy_columns[1].repeat(128, 0)).T @ (x_columns[0] / x_columns[1].repeat(128, 0))
    assert np.abs(dw.numpy() - expected).max() < 1e-5 * np.abs(expected).max()


def test_columns_of_a_kept_weight_are_those_made_at_once() -> None:
    w, copies = torch.randn(256, 640), Fp8Copies()
    assert copies.of(CPU, w, False, blocks.squares).columns is None
    found, right = copies.of(CPU, w, True, blocks.squares), blocks.squares(CPU, w, True, True)
    for a, b in zip(found, right, strict=True):
        assert a is not None and b is not None and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
