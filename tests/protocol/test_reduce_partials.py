"""The reduction behind a wait, which otherwise only GPUs run: the CPU adds with torch."""

from __future__ import annotations

import pytest
import torch

from overlap_train.kernels.gemm_reduce_scatter import reduce_partials_kernel


@pytest.mark.parametrize("aborted", [0, 1])
def test_the_reduction_behind_a_wait_is_nan_where_a_wait_gave_up(aborted: int) -> None:
    world, size, rank = 3, 40, 1
    own, received = torch.arange(size, dtype=torch.float32), torch.full((world, size), 0.5)
    received[rank] = torch.nan  # what no peer writes is not read
    y, abort = torch.empty_like(own), torch.tensor([aborted], dtype=torch.int64)
    reduce_partials_kernel[(3,)](own, received, y, size, rank, abort, WORLD=world, BLOCK=16)
    assert torch.equal(y, own + 1.0) if not aborted else bool(y.isnan().all())
