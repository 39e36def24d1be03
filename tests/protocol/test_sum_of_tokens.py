"""The kernel that sums a token's rows, run alone."""

from __future__ import annotations

import pytest
import torch

from overlap_train.kernels.sum_of_tokens import sum_of_tokens_kernel


@pytest.mark.parametrize("features", [1, 16, 21])
def test_rows_are_added_in_their_order_and_rounded_once(features: int) -> None:
    """In fp16 2048 + 1 is 2048: sums of 2048, 1, 1 are 2050 in fp32, and 2048 where each is rounded. Tokens may have no rows."""
    counts = [3, 0, 1, 4]
    rows = torch.tensor([2048.0, 1.0, 1.0, 5.0, 3e4, 3e4, -3e4, -3e4])[:, None] + torch.zeros(features)
    places = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    in_slot, index = torch.full((10, features), torch.nan, dtype=torch.float16), places + 1
    in_slot[index] = rows.half()
    ends = torch.tensor([0, *counts]).cumsum(0)
    y = torch.full((len(counts), features), -1.0, dtype=torch.float16)
    sum_of_tokens_kernel[(len(counts),)](in_slot, index, ends, y, features, torch.tensor([0]), BLOCK=16)
    assert torch.equal(y.float(), torch.tensor([2050.0, 0.0, 5.0, 0.0])[:, None].expand(-1, features))
    sum_of_tokens_kernel[(len(counts),)](in_slot, index, ends, y, features, torch.tensor([1]), BLOCK=16)
    assert y.isnan().all(), "where a wait gave up"
