"""The check before timing: rounding passes, everything else fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_train.tools.measure import check as measure_check
from overlap_train.tools.measure.check import WrongResult, check, product_reference, scatter_reference
from tests.processes import run_ranks, values


def _matrices(seed: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((64, 512), (512, 48))
    a, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    return a, b


def _rounded_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.float() @ b.float()).to(a.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_rounded_product_passes(dtype: torch.dtype) -> None:
    a, b = _matrices(0, dtype)
    check("product", _rounded_product(a, b), product_reference(a, b))


def test_a_missing_step_over_k_fails() -> None:
    a, b = _matrices(0)
    with pytest.raises(WrongResult, match=r"product: .* elements differ"):
        check("product", _rounded_product(a[:, 32:], b[32:]), product_reference(a, b))


def test_one_nan_fails() -> None:
    a, b = _matrices(0)
    y = _rounded_product(a, b)
    y[3, 4] = torch.nan
    with pytest.raises(WrongResult, match=r"1 of 3072 elements .* inf times"):
        check("product", y, product_reference(a, b))


@pytest.mark.parametrize("block", [1, 1000, 1 << 20])
def test_every_row_is_checked_whatever_a_block_holds(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_check, "_BLOCK", block)
    a, b = _matrices(0)
    y, reference = _rounded_product(a, b), product_reference(a, b)
    check("product", y, reference)
    torch.testing.assert_close(reference.exact, a.double() @ b.double(), rtol=1e-12, atol=1e-9)
    y[torch.tensor([0, 20, 63]), 7] += 8
    with pytest.raises(WrongResult, match=r"3 of 3072 elements"):
        check("product", y, reference)


def test_a_wrong_shape_fails() -> None:
    a, b = _matrices(0)
    with pytest.raises(WrongResult, match="shape"):
        check("product", _rounded_product(a, b).t(), product_reference(a, b))


def _scatter(rank: int, world: int) -> Any:
    """Verdicts on the sum of rounded partials, on one rank's partial alone, and on another rank's rows."""
    pairs = [_matrices(seed) for seed in range(world)]
    partials = [_rounded_product(a, b) for a, b in pairs]
    reference = scatter_reference(*pairs[rank], dist.group.WORLD)
    mine = lambda y, r=rank: y.chunk(world)[r]  # noqa: E731
    total = sum(p.float() for p in partials).to(torch.bfloat16)
    verdicts = []
    for result in (mine(total), mine(partials[0]), mine(total, (rank + 1) % world)):
        try:
            check("scatter", result, reference)
            verdicts.append(True)
        except WrongResult:
            verdicts.append(False)
    return verdicts


def test_partial_sums_may_be_rounded_but_not_missing_or_swapped() -> None:
    assert values(run_ranks(2, _scatter)) == [[True, False, False]] * 2
