"""In which precision the weight gradient is added up: 257 is the sum that no 16-bit dtype here holds beside its neighbours.

Where it goes: tests/megatron/test_main_grad.py.
"""

from __future__ import annotations

import pytest
import torch

from overlap_train.ops.wgrad import WeightGradient

N, K, ROWS = 3, 5, 6
# Exact in fp32, and halfway between two values of the dtype.
HALFWAY = {torch.bfloat16: 257.0, torch.float16: 2049.0}


def weight_gradient(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, main_grad: str) -> torch.Tensor | None:
    gradient = WeightGradient(weight, main_grad)
    gradient.add(dy, x)
    return gradient.result()


def _weight(dtype: torch.dtype, main_grad: torch.Tensor) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(N, K, dtype=dtype))
    weight.main_grad = main_grad
    return weight


def _operands(dtype: torch.dtype, total: float) -> tuple[torch.Tensor, torch.Tensor]:
    """dy [ROWS, N] and x [ROWS, K] whose product dy.T @ x is `total` everywhere: total - 1 of one row and 1 of another."""
    dy = torch.zeros(ROWS, N, dtype=dtype)
    dy[1], dy[4] = total - 1, 1.0
    return dy, torch.ones(ROWS, K, dtype=dtype)


@pytest.mark.parametrize("dtype", HALFWAY, ids=str)
def test_products_of_16_bits_are_added_to_main_grad_without_rounding(dtype: torch.dtype) -> None:
    weight = _weight(dtype, torch.full((N, K), 0.5))
    for count in (1, 2):
        assert weight_gradient(*_operands(dtype, HALFWAY[dtype]), weight, "accumulate") is None
        assert torch.equal(weight.main_grad, torch.full((N, K), 0.5 + count * HALFWAY[dtype]))


@pytest.mark.parametrize(
    ("dtype", "of_main_grad"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float16)],
    ids=str,
)
def test_main_grad_of_any_dtype_is_added_to(dtype: torch.dtype, of_main_grad: torch.dtype) -> None:
    weight = _weight(dtype, torch.full((N, K), 2.0, dtype=of_main_grad))
    dy, x = torch.arange(ROWS * N, dtype=dtype).view(ROWS, N), torch.arange(ROWS * K, dtype=dtype).view(ROWS, K) % 3
    assert weight_gradient(dy, x, weight, "accumulate") is None
    assert torch.equal(weight.main_grad.double(), 2 + dy.double().t() @ x.double())
    assert weight.main_grad.dtype == of_main_grad


@pytest.mark.parametrize("dtype", HALFWAY, ids=str)
def test_parts_are_summed_before_a_main_grad_of_16_bits_is_rounded(dtype: torch.dtype) -> None:
    """Each part alone is half of what the last digit of main_grad stands for."""
    weight = _weight(dtype, torch.full((N, K), HALFWAY[dtype] - 1, dtype=dtype))
    gradient = WeightGradient(weight, "accumulate", parts=2)
    for _ in range(2):
        gradient.add(*_operands(dtype, 1.0))
    assert gradient.result() is None
    assert torch.equal(weight.main_grad, torch.full((N, K), HALFWAY[dtype] + 1, dtype=dtype))
