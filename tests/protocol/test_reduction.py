"""In which precision and order partial sums are added: values whose sum tells."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from overlap_train import OverlapConfig, all_gather_linear, linear_reduce_scatter
from overlap_train.kernels.gemm_reduce_scatter import reduce_partials_kernel
from tests.processes import run_ranks, values

WORLD = 3
LARGE = 2.0**24  # LARGE + 1 is LARGE in fp32
# What ranks 0, 1 and 2 contribute, with a bias behind them or none, and what each must get: its own partial first, then the
# others' in the order of ranks, then the bias.
SUMS: dict[str, tuple[torch.dtype, tuple[float, ...], tuple[float, ...]]] = {
    "bf16": (torch.bfloat16, (256.0, 1.0, 1.0), (258.0, 258.0, 258.0)),  # 256 + 1 is 256 in bf16
    "fp16": (torch.float16, (2048.0, 1.0, 1.0), (2050.0, 2050.0, 2050.0)),
    "order": (torch.float32, (LARGE, 1.0, -LARGE), (0.0, 0.0, 1.0)),
    "bf16 and bias": (torch.bfloat16, (256.0, 1.0, 0.0, 1.0), (258.0, 258.0, 258.0)),
    "fp16 and bias": (torch.float16, (2048.0, 0.0, 1.0, 1.0), (2050.0, 2050.0, 2050.0)),
    "order and bias": (torch.float32, (LARGE, 0.0, -LARGE, 1.0), (1.0, 1.0, 1.0)),
}
BY_LIBRARY, INTERPRETED = tuple(SUMS), tuple(name for name, (dtype, *_) in SUMS.items() if dtype != torch.bfloat16)
SUMS_OF = {"chunked": BY_LIBRARY, "low_latency": BY_LIBRARY, "fused": INTERPRETED, "direct": INTERPRETED}


def _sums(rank: int, world: int) -> dict[str, list[float]]:
    """The different values that this rank gets, by method and sum."""
    got = {}
    for method, names in SUMS_OF.items():
        for name in names:
            dtype, parts, _ = SUMS[name]
            x, w = torch.ones(2 * world, 1, dtype=dtype), torch.full((4, 1), parts[rank], dtype=dtype)
            config = OverlapConfig(method=method, timeout_s=30.0)
            bias = torch.full((4,), *parts[world:], dtype=dtype) if parts[world:] else None
            y = linear_reduce_scatter(x, w, bias, group=dist.group.WORLD, config=config)
            got[f"{method}, {name}"] = sorted(set(y.double().flatten().tolist()))
    return got


def _products_with_bias(rank: int, world: int) -> None:
    for method in ("collective", *SUMS_OF):
        for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
            if dtype == torch.bfloat16 and method in ("fused", "direct"):
                continue
            x, one = torch.tensor([[large, 1.0]], dtype=dtype), torch.ones(4, dtype=dtype)
            config = OverlapConfig(method=method, timeout_s=30.0)
            y = all_gather_linear(x, one[:, None].repeat(1, 2), one, group=dist.group.WORLD, config=config)
            assert y.unique().tolist() == [large + 2], (method, dtype)


def test_a_product_is_rounded_with_its_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """257 + 1 are 256 + 1 where the product is rounded to bf16 before."""
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    values(run_ranks(2, _products_with_bias))


def test_partial_sums_are_added_in_fp32_own_first_and_then_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    for rank, got in enumerate(values(run_ranks(WORLD, _sums))):
        expected = {f"{method}, {name}": [SUMS[name][2][rank]] for method, names in SUMS_OF.items() for name in names}
        assert got == expected, f"rank {rank}"


@pytest.mark.parametrize("aborted", [0, 1])
@pytest.mark.parametrize("name", INTERPRETED)
def test_so_does_the_kernel_after_a_wait_and_it_writes_only_its_result(name: str, aborted: int) -> None:
    """NaN where a wait gave up. Only GPUs run it otherwise: the CPU adds with torch. Rows are of 5: a bias may go on from one
    program to the next."""
    size, n, (dtype, parts, expected) = 40, 5, SUMS[name]
    bias, steps = (parts[-1] + 2 * torch.arange(n)).to(dtype) if parts[WORLD:] else None, 2.0 * torch.arange(n)
    for rank in range(WORLD):
        received = torch.tensor(parts[:WORLD], dtype=dtype)[:, None].repeat(1, size)
        own, received[rank] = received[rank].clone(), torch.nan  # no peer writes the own block, and nobody may read it
        result, abort = torch.full((size + 1,), -1.0, dtype=dtype), torch.tensor([aborted], dtype=torch.int64)
        reduce_partials_kernel[(3,)](own, received, bias, result[:size], size, n, rank, abort, WORLD=WORLD, BLOCK=16)
        sums = expected[rank] + (0 if bias is None else steps.repeat(size // n))
        assert bool(result[:size].isnan().all() if aborted else (result[:size] == sums).all())
        assert result[size] == -1.0
