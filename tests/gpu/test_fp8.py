"""What GPUs make of matrices in fp8 is what CPUs make of them, to the bit: rows, columns, or both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_train import OverlapConfig
from overlap_train.group.domain import OverlapDomain
from overlap_train.group.registry import domain_of
from overlap_train.ops import blocks, quantize
from overlap_train.ops.quantize import FORWARD

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
WRITTEN = [(True, True), (True, False), (False, True)]
CPU: Any = SimpleNamespace(on_gpu=False)


@pytest.fixture
def domain(group: dist.ProcessGroup, device: torch.device, provider: str, wait_s: float) -> OverlapDomain:
    return domain_of(group, OverlapConfig(provider=provider, timeout_s=wait_s, symmetric_mib=2048), device)


def matrix(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """x [M, K] of several magnitudes, with rows, columns and a square of zeros, and an infinity and a NaN among numbers."""
    generator = torch.Generator().manual_seed(m + k)
    x = torch.randn(m, k, generator=generator) * 2.0 ** torch.randint(-6, 7, (m, 1), generator=generator)
    x[:: m // 3 + 1] = 0
    x[:, 5] = 0
    x[128:256, 128:256] = 0
    x[m // 2, k // 2], x[-1, 3] = torch.inf, torch.nan
    return x.to(dtype)


def check_same(found: Any, expected: Any) -> None:
    """Tensors, to the bit where they are numbers, tuples of them, or None."""
    if isinstance(found, tuple):
        for one, other in zip(found, expected, strict=True):
            check_same(one, other)
    elif found is None:
        assert expected is None
    else:
        found, nan = found.cpu(), expected.float().isnan()
        assert found.dtype == expected.dtype and torch.equal(found.float().isnan(), nan)
        bits, right = (x.contiguous().view(torch.uint8).view(*x.shape, -1) for x in (found, expected))
        assert torch.equal(bits[~nan], right[~nan])


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_of_matrices_that_lie_one_below_the_other(
    domain: OverlapDomain, dtype: torch.dtype, written: tuple[bool, bool]
) -> None:
    for n, k, height in ((256, 384, 256), (512, 128, 256), (384, 256, 128)):
        w = matrix(n, k, dtype)
        check_same(
            blocks.squares(domain, w.to(domain.device), *written, height), blocks.squares(CPU, w, *written, height)
        )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces(domain: OverlapDomain, dtype: torch.dtype, written: tuple[bool, bool], packed: bool) -> None:
    for m, k in ((128, 128), (384, 256), (256, 640)):
        x = matrix(m, k, dtype)
        made = []
        for of, where in ((x.to(domain.device), domain), (x, CPU)):
            room = (blocks.new_packed, blocks.new_packed) if packed else (blocks.new_rows, blocks.new_columns)
            rows, columns = (new(of) if wanted else None for new, wanted in zip(room, written, strict=True))
            blocks.write_pieces(where, of, rows, columns)
            one = [tuple(each) if isinstance(each, tuple) else each for each in (rows, columns) if each is not None]
            if packed:
                one = [(each[:, :k], blocks.tails(each, k)) for each in one]
            made.append(tuple(one))
        check_same(*made)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_rows_of_any_number_stand_for_what_was_packed(domain: OverlapDomain, dtype: torch.dtype) -> None:
    for m in (1, 31, 300):
        x = matrix(m, 256, dtype) if m > 3 else torch.ones(m, 256, dtype=dtype)
        packed, expected = blocks.packed_rows(domain, x.to(domain.device)), blocks.packed_rows(CPU, x)
        check_same(
            *((each.view(FORWARD)[:, :256], blocks.tails(each.view(FORWARD), 256)) for each in (packed, expected))
        )
        check_same(
            *(blocks.unpacked_rows(where, each, 256, dtype) for where, each in ((domain, packed), (CPU, expected)))
        )


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("format", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_scale(domain: OverlapDomain, dtype: torch.dtype, format: torch.dtype, written: tuple[bool, bool]) -> None:
    """Of a matrix without infinities, by its own scale; and columns of what is there by rows."""
    for m, k in ((128, 128), (300, 264), (8, 1032)):
        x = matrix(m, k, dtype).float().nan_to_num(0.0, 0.0).to(dtype)
        there = x.to(domain.device)
        found = quantize.quantized(domain, there, quantize.largest(domain, there), format, *written)
        check_same(found, quantize.quantized(CPU, x, quantize.largest(CPU, x), format, *written))
        if found.rows is not None:
            check_same(quantize.transposed(domain, found.rows), found.rows.cpu().t())
