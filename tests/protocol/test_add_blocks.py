"""The sum between nodes, of the blocks that are named and in their order."""

from __future__ import annotations

import pytest
import torch

from overlap_train.kernels.add_blocks import add_blocks_kernel


@pytest.mark.parametrize("programs", [1, 2, 3, 5])
@pytest.mark.parametrize("aborted", [0, 1])
def test_named_blocks_are_added_in_their_order(aborted: int, programs: int) -> None:
    """In fp32 the result is right in this order only: the own block, then 3, then 0. Blocks 1 and 2 are not read. Three tiles are
    taken by any number of programs."""
    size, chunk, order = 40, 16, torch.tensor([3, 0])
    received = torch.full((4, 2 * size), torch.nan)
    own, received[3, chunk:], received[0, chunk:] = torch.full((size,), 2.0**24), -(2.0**24), 1.0
    y, abort = torch.full_like(own, torch.nan), torch.tensor([aborted], dtype=torch.int64)
    part = received[:, chunk : chunk + size]
    add_blocks_kernel[(programs,)](own, part, order, y, size, part.stride(0), abort, COUNT=2, BLOCK=16)
    assert bool((y == 1.0).all()) if not aborted else bool(y.isnan().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_bits_do_not_depend_on_the_number_of_programs(dtype: torch.dtype) -> None:
    """Of numbers that rounding treats differently in every other order."""
    torch.manual_seed(0)
    size, order, abort = 1000, torch.tensor([2, 0, 1]), torch.zeros(1, dtype=torch.int64)
    own, received = torch.randn(size).to(dtype), (1000 * torch.randn(3, size)).to(dtype)
    found = []
    for programs in (1, 3, 7, 16):
        y = torch.full_like(own, torch.nan)
        add_blocks_kernel[(programs,)](own, received, order, y, size, size, abort, COUNT=3, BLOCK=64)
        found.append(y)
    by_hand = own.float()
    for block in order:
        by_hand = by_hand + received[block].float()
    assert all(torch.equal(y, by_hand.to(dtype)) for y in found)
