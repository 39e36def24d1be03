"""The product of one output tile reads nothing but the operands."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from overlap_train.kernels.tiles import tile_offsets, tile_product

BLOCK = 16


@triton.jit
def multiply_kernel(a_ptr, b_ptr, acc_ptr, inside_ptr, tile_m, tile_n, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
                    BLOCK: tl.constexpr):  # fmt: skip
    """acc, inside [BLOCK, BLOCK]: all of a tile's product, and which part of it lies in [m, n]."""
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    acc = tile_product(acc, a_ptr, b_ptr, tile_m, tile_n, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
                       BLOCK, BLOCK, BLOCK, "ieee")  # fmt: skip
    rows, cols, mask = tile_offsets(tl.cast(tile_m, tl.int32), tl.cast(tile_n, tl.int32), m, n, BLOCK, BLOCK)
    place = (rows - tile_m * BLOCK) * BLOCK + cols - tile_n * BLOCK
    tl.store(acc_ptr + place, acc)
    tl.store(inside_ptr + place, mask.to(tl.int32))


def _within_nan(matrix: torch.Tensor, transposed: bool) -> torch.Tensor:
    """The matrix between rows and columns of NaN, perhaps column by column."""
    rows, cols = matrix.shape
    memory = torch.full((cols + 40, rows + 40) if transposed else (rows + 40, cols + 40), torch.nan)
    inner = (memory.t() if transposed else memory)[20 : 20 + rows, 20 : 20 + cols]
    return inner.copy_(matrix)


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("m", "n", "k"), [(21, 37, 40), (16, 16, 16), (3, 5, 1)])
def test_a_product_reads_its_operands_only(m: int, n: int, k: int, transposed: tuple[bool, bool]) -> None:
    generator = torch.Generator().manual_seed(m)
    a, b = (torch.randint(-4, 5, shape, generator=generator).float() for shape in ((m, k), (k, n)))
    left, right = (_within_nan(matrix, how) for matrix, how in zip((a, b), transposed, strict=True))
    whole = torch.full((-(-m // BLOCK) * BLOCK, -(-n // BLOCK) * BLOCK), torch.nan)
    whole[:m, :n] = a @ b
    for tile_m in range(whole.shape[0] // BLOCK):
        for tile_n in range(whole.shape[1] // BLOCK):
            acc, inside = torch.empty(BLOCK, BLOCK), torch.empty(BLOCK, BLOCK, dtype=torch.int32)
            sizes = (tile_m, tile_n, m, n, k, *left.stride(), *right.stride())
            multiply_kernel[(1,)](left, right, acc, inside, *sizes, BLOCK=BLOCK)
            expected = whole[tile_m * BLOCK :, tile_n * BLOCK :][:BLOCK, :BLOCK]
            assert not acc.isnan().any(), "read beyond an operand"
            assert torch.equal(inside == 1, ~expected.isnan())
            assert torch.equal(acc[inside == 1], expected[inside == 1])
