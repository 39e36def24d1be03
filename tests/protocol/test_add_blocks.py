"""The sum between nodes, of the blocks that are named and in their order."""

from __future__ import annotations

import pytest
import torch

from overlap_train.kernels.add_blocks import add_blocks_kernel


@pytest.mark.parametrize("aborted", [0, 1])
def test_named_blocks_are_added_in_their_order(aborted: int) -> None:
    """In fp32 the result is right in this order only: the own block, then 3, then 0. Blocks 1 and 2 are not read."""
    size, chunk, order = 40, 16, torch.tensor([3, 0])
    received = torch.full((4, 2 * size), torch.nan)
    own, received[3, chunk:], received[0, chunk:] = torch.full((size,), 2.0**24), -(2.0**24), 1.0
    y, abort = torch.empty_like(own), torch.tensor([aborted], dtype=torch.int64)
    part = received[:, chunk : chunk + size]
    add_blocks_kernel[(3,)](own, part, order, y, size, part.stride(0), abort, COUNT=2, BLOCK=16)
    assert bool((y == 1.0).all()) if not aborted else bool(y.isnan().all())
