"""In which precision and order partial sums are added: values whose sum tells."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from overlap_train import OverlapConfig, linear_reduce_scatter
from overlap_train.kernels.gemm_reduce_scatter import reduce_partials_kernel
from tests.processes import run_ranks, values

WORLD = 3
LARGE = 2.0**24  # LARGE + 1 is LARGE in fp32
# What ranks 0, 1 and 2 contribute, and what each must get: its own partial first, then the others' in the order of ranks.
SUMS = {
    "bf16": (torch.bfloat16, (256.0, 1.0, 1.0), (258.0, 258.0, 258.0)),  # 256 + 1 is 256 in bf16
    "fp16": (torch.float16, (2048.0, 1.0, 1.0), (2050.0, 2050.0, 2050.0)),
    "order": (torch.float32, (LARGE, 1.0, -LARGE), (0.0, 0.0, 1.0)),
}
SUMS_OF = {"chunked": ("bf16", "fp16", "order"), "fused": ("fp16", "order"), "direct": ("fp16", "order")}


def _sums(rank: int, world: int) -> dict[str, list[float]]:
    """The different values that this rank gets, by method and sum."""
    got = {}
    for method, names in SUMS_OF.items():
        for name in names:
            dtype, parts, _ = SUMS[name]
            x, w = torch.ones(2 * world, 1, dtype=dtype), torch.full((4, 1), parts[rank], dtype=dtype)
            config = OverlapConfig(method=method, timeout_s=30.0)
            y = linear_reduce_scatter(x, w, group=dist.group.WORLD, config=config)
            got[f"{method}, {name}"] = sorted(set(y.double().flatten().tolist()))
    return got


def test_partial_sums_are_added_in_fp32_own_first_and_then_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    for rank, got in enumerate(values(run_ranks(WORLD, _sums))):
        expected = {f"{method}, {name}": [SUMS[name][2][rank]] for method, names in SUMS_OF.items() for name in names}
        assert got == expected, f"rank {rank}"


@pytest.mark.parametrize("aborted", [0, 1])
@pytest.mark.parametrize("name", ["fp16", "order"])
def test_so_does_the_kernel_after_a_wait_and_it_writes_only_its_result(name: str, aborted: int) -> None:
    """NaN where a wait gave up. Only GPUs run it otherwise: the CPU adds with torch."""
    size, (dtype, parts, expected) = 40, SUMS[name]
    for rank in range(WORLD):
        received = torch.tensor(parts, dtype=dtype)[:, None].repeat(1, size)
        own, received[rank] = received[rank].clone(), torch.nan  # no peer writes the own block, and nobody may read it
        result, abort = torch.full((size + 1,), -1.0, dtype=dtype), torch.tensor([aborted], dtype=torch.int64)
        reduce_partials_kernel[(3,)](own, received, result[:size], size, rank, abort, WORLD=WORLD, BLOCK=16)
        assert bool(result[:size].isnan().all()) if aborted else set(result[:size].tolist()) == {expected[rank]}
        assert result[size] == -1.0
