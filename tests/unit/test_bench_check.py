"""The check before timing: rounding passes, everything else fails."""

from __future__ import annotations

import re
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


def _limits(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(product in fp64, norms of a's rows times those of b's columns)."""
    return a.double() @ b.double(), torch.outer(a.double().norm(dim=1), b.double().norm(dim=0))


@pytest.mark.parametrize("block", [1000, 1 << 26])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_product_may_differ_by_what_rounding_explains(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """u |exact| + 2 K e |a| |b|, and 5 %."""
    monkeypatch.setattr(measure_check, "_BLOCK", block)
    a, b = _matrices(0, dtype)
    exact, norms = _limits(a, b)
    u, e = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps
    expected = 1.05 * (u * exact.abs() + 2 * 512 * e * norms)
    torch.testing.assert_close(product_reference(a, b).tolerance(slice(3, 60)), expected[3:60])


def test_the_worst_of_all_blocks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_check, "_BLOCK", 100)
    a, b = _matrices(0)
    y, reference = _rounded_product(a, b), product_reference(a, b)
    y[2, 0] += 800
    y[60, 0] += 8
    worst = float(((y.double() - reference.exact).abs() / reference.tolerance(slice(None)))[2, 0])
    with pytest.raises(WrongResult, match=r"2 of 3072 elements .*" + re.escape(f"worst by {worst:.3g} times")):
        check("product", y, reference)


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


def _scattered_limit(rank: int, world: int) -> bool:
    pairs = [_matrices(seed) for seed in range(world)]
    found = [_limits(a, b) for a, b in pairs]
    exact, spread, norms = sum(p for p, _ in found), sum(p.abs() for p, _ in found), sum(n for _, n in found)
    u, e = torch.finfo(torch.bfloat16).eps / 2, torch.finfo(torch.float32).eps
    expected = 1.05 * (u * exact.abs() + world * u * spread + 2 * (world * 512 + world) * e * norms)
    mine = expected.chunk(world)[rank]
    torch.testing.assert_close(scatter_reference(*pairs[rank], dist.group.WORLD).tolerance(slice(None)), mine)
    return True


def test_a_sum_of_partials_may_differ_by_what_rounding_explains() -> None:
    """u |exact| + W u sum_r |p_r| + 2 (K + W) e |a| |b|, and 5 %; K of all ranks."""
    assert values(run_ranks(2, _scattered_limit)) == [True, True]


def test_partial_sums_may_be_rounded_but_not_missing_or_swapped() -> None:
    assert values(run_ranks(2, _scatter)) == [[True, False, False]] * 2
