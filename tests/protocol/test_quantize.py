"""The kernels that make fp8 of matrices, interpreted, against torch to the bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_train.gpu.launch import LaunchCache
from overlap_train.ops import quantize
from overlap_train.ops.quantize import FORWARD, GRADIENT


@pytest.fixture
def domain() -> Any:
    """What quantize.py needs of a domain on a GPU."""
    return SimpleNamespace(on_gpu=True, device=None, launches=LaunchCache(None, 0))


def keeps_its_exponent(x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Triton's interpreter forgets the carry where a number is rounded up to the next power of two, and rounds subnormals down.
    It rounds ties up, of which random numbers in fp32 have none."""
    is_normal = x.abs() >= torch.finfo(rounded.dtype).smallest_normal
    return (x == 0) | (is_normal & (x.abs().frexp().exponent == rounded.float().abs().frexp().exponent))


@pytest.mark.parametrize("dtype", [FORWARD, GRADIENT["tensorwise"]])
@pytest.mark.parametrize(("m", "k"), [(70, 48), (16, 16), (300, 200)])
def test_rows_and_columns_are_torchs(domain: Any, m: int, k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, k, generator=generator) * torch.randn(m, 1, generator=generator).exp()
    amax = quantize.largest(domain, x)
    assert amax.shape == (128,) and amax.max() == x.abs().max()
    made, right = (
        quantize.quantized(domain, x, amax, dtype, columns=True),
        quantize.quantized_by_torch(x, amax, dtype, columns=True),
    )
    assert made.rows is not None and made.columns is not None and right.rows is not None
    same = made.rows.view(torch.uint8) == right.rows.view(torch.uint8)
    kept = keeps_its_exponent(x / right.inverse, right.rows)
    assert bool((same | ~kept).all()) and kept.float().mean() > 0.8
    assert torch.equal(made.columns.view(torch.uint8), made.rows.view(torch.uint8).t())
    assert torch.equal(made.inverse, right.inverse)
    assert torch.equal(quantize.transposed(domain, right.rows).view(torch.uint8), right.columns.view(torch.uint8))  # type: ignore[union-attr]


@pytest.mark.parametrize("m", [16, 300])
def test_a_given_scale_is_taken_and_told_the_largest_element(domain: Any, m: int) -> None:
    x, told = torch.randn(m, 48, generator=torch.Generator().manual_seed(m)), [torch.full((1,), 2.0) for _ in range(2)]
    x[2, 3], x[7, 8] = torch.nan, -5.0
    makers = (quantize.quantized, domain), (lambda _, *rest: quantize.quantized_by_torch(*rest), None)
    for amax, largest in ((2.0, 5.0), (6.0, 6.0)):
        made = []
        for (make, where), its in zip(makers, told, strict=True):
            its.fill_(amax)
            made.append(make(where, x, quantize.Given(torch.tensor(16.0), its), FORWARD))
            make(where, 10 * x, quantize.Given(torch.tensor(16.0), None), FORWARD)
        assert torch.equal(made[0].inverse, torch.full((1,), 1 / 16)) and torch.equal(made[0].inverse, made[1].inverse)
        same, kept = made[0].rows.float() == made[1].rows.float(), keeps_its_exponent(16 * x, made[1].rows)
        assert bool((same | ~kept | x.isnan()).all()) and [one.item() for one in told] == [largest] * 2


@pytest.mark.parametrize("strange", [0.0, torch.inf, torch.nan, 1e-45])
def test_strange_numbers(domain: Any, strange: float) -> None:
    """An inverse that is no number makes every product so."""
    x = torch.zeros(16, 16)
    x[3, 5] = strange
    amax = quantize.largest(domain, x)
    inverses = [
        quantize.quantized(domain, x, amax, FORWARD).inverse,
        quantize.quantized_by_torch(x, amax, FORWARD).inverse,
    ]
    assert torch.equal(*inverses) or all(bool(inverse.isnan().all()) for inverse in inverses)
    assert bool(inverses[0].isfinite().all()) == (strange in (0.0, 1e-45)) and (strange != 0.0 or inverses[0] == 1)
