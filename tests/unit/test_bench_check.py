"""The check before timing: rounding passes, everything else fails; and what is counted as exposed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_train.tools.measure.check import WrongResult, check
from overlap_train.tools.measure.timing import Pace, Timing, measure
from tests.processes import run_ranks, values


def _matrices(seed: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((64, 512), (512, 48)))
    return a, b


def _rounded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.float() @ b.float()).to(a.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_rounded_product_passes(dtype: torch.dtype) -> None:
    a, b = _matrices(0, dtype)
    check("product", _rounded(a, b), a @ b)


def test_wrong_products_fail() -> None:
    """A missing step over K, elements that are wrong, a NaN, another shape."""
    a, b = _matrices(0)
    y, reference = _rounded(a, b), a @ b
    with pytest.raises(WrongResult, match=r"product: .* elements differ"):
        check("product", _rounded(a[:, 32:], b[32:]), reference)
    off, nan = y.clone(), y.clone()
    off[torch.tensor([0, 20, 63]), 7] += 8  # a third of a row's usual size
    nan[3, 4] = torch.nan
    with pytest.raises(WrongResult, match=r"3 of 3072 elements"):
        check("product", off, reference)
    with pytest.raises(WrongResult, match=r"1 of 3072 elements"):
        check("product", nan, reference)
    with pytest.raises(WrongResult, match="shape"):
        check("product", y.t(), reference)


def _on_ranks(rank: int, world: int) -> Any:
    """Verdicts on the sum of rounded partials, on one rank's partial alone, and on another rank's rows; and a measurement."""
    pairs = [_matrices(seed) for seed in range(world)]
    partials = [_rounded(a, b) for a, b in pairs]
    reference = sum(a.float() @ b.float() for a, b in pairs).chunk(world)[rank]
    total = sum(p.float() for p in partials).to(torch.bfloat16)
    verdicts = []
    for whole, own in ((total, rank), (partials[0], rank), (total, (rank + 1) % world)):
        try:
            check("scatter", whole.chunk(world)[own], reference)
            verdicts.append(True)
        except WrongResult:
            verdicts.append(False)
    log: list[str] = []
    calls = {name: lambda index, name=name: log.append(name) for name in "abcd"}
    timings = measure(calls, Pace(rounds=5, burst=2), dist.group.WORLD, torch.device("cpu"))
    return verdicts, log, timings


def test_partial_sums_may_be_rounded_but_not_missing_or_swapped_and_calls_take_turns() -> None:
    (verdicts, log, timings), (verdicts_1, log_1, timings_1) = values(run_ranks(2, _on_ranks))
    assert verdicts == verdicts_1 == [True, False, False]
    assert log == log_1 and timings == timings_1, "one order, and the times of the slowest rank"
    rounds = [log[first : first + 12 : 3] for first in range(0, 60, 12)]
    assert [sorted(turn) for turn in rounds] == [["a", "b", "c", "d"]] * 5 and len({tuple(turn) for turn in rounds}) > 1
    assert list(timings) == ["a", "b", "c", "d"] and all(isinstance(timing, Timing) for timing in timings.values())
