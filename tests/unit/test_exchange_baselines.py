"""The baselines of Ulysses' projections do no work that a model which uses them would not do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_train.schedule.order import A2A_GEMM, GEMM_A2A
from overlap_train.tools.bench import exchange_baselines
from overlap_train.tools.bench.exchange_baselines import shares_of, three_parts, three_weights
from overlap_train.tools.measure.cases import Case
from overlap_train.tools.measure.operands import make_operands
from overlap_train.tools.measure.world import World
from tests.processes import run_ranks, values


def test_weights_are_cut_into_each_ranks_columns() -> None:
    right = torch.arange(2.0 * 24).view(24, 2).t()  # [K, F], two ranks with 8 columns of q, 2 of k and 2 of v each
    q, k, v = three_weights(right, 2, (4, 1, 1))
    assert q[0].tolist() == [2.0 * n for n in (*range(8), *range(12, 20))]
    assert k[0].tolist() == [2.0 * n for n in (8, 9, 20, 21)]
    assert v[1].tolist() == [2.0 * n + 1 for n in (10, 11, 22, 23)]
    assert all(part.t().is_contiguous() for part in (q, k, v))


@pytest.mark.parametrize(
    ("case", "ranks", "widths"),
    [
        (Case("llama3-8b", GEMM_A2A, "fprop", 8192, 6144, 4096), 2, (2048, 512, 512)),
        (Case("llama3-70b", GEMM_A2A, "fprop", 8192, 10240, 8192), 4, (2048, 256, 256)),
        (Case("table6", GEMM_A2A, "fprop", 262144, 8192, 8192), 2, (1280, 1408, 1408)),
        (Case("llama3-8b", A2A_GEMM, "dgrad", 8192, 4096, 4096), 2, (768, 640, 640)),
        (Case("", GEMM_A2A, "fprop", 16, 64, 32), 2, (10, 11, 11)),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_weights_are_cut_at_whole_heads_as_the_model_has_them(case: Case, ranks: int, widths: tuple[int, ...]) -> None:
    """Where nothing is q, k or v the parts are equal."""
    columns = sum(widths)
    assert columns * ranks == (case.n if case.pass_ == "fprop" else case.k)
    parts = three_parts(columns, shares_of(case))
    assert tuple(last - first for first, last in parts) == widths
    assert [first for first, _ in parts] == [0, *(last for _, last in parts[:-1])] and parts[-1][1] == columns


def _three_gemms(rank: int, world: int) -> Any:
    """(weights cut in all, and before the first call; whether the parts are the columns of the sequence's result)"""
    cuts: list[int] = []

    def counted(right: torch.Tensor, ranks: int, shares: tuple[int, int, int]) -> list[torch.Tensor]:
        cuts.append(id(right))
        return three_weights(right, ranks, shares)

    exchange_baselines.three_weights = counted  # this process ends after it
    here = World(dist.group.WORLD, torch.device("cpu"), rank, world)
    case = Case("", GEMM_A2A, "fprop", 16, 24, 8)
    sets = [make_operands(case, here, torch.float32, seed) for seed in range(2)]
    runs = exchange_baselines.exchange_baselines(case, here, sets)
    before = len(cuts)
    for operands in (*sets, *sets):
        parts, whole = runs["three_gemms"](operands), runs["sequence"](operands)
        torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    return before, len(cuts), len(parts)


def test_weights_are_cut_before_the_first_call_and_nothing_is_put_together() -> None:
    """Cut in a call, the copy of a whole weight would be timed with the baseline; so would q, k and v put into one tensor."""
    assert values(run_ranks(2, _three_gemms)) == [(2, 2, 3)] * 2
