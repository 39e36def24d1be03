"""RMSNorm of q and k: results and gradients against fp64."""

from __future__ import annotations

import pytest
import torch

from overlap_train import QkNorm


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_results_and_gradients_are_those_of_fp64(weights: torch.dtype, zero_centered: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(5, 3, 6, 8, generator=generator) for _ in range(2))
    weight = torch.randn(8, generator=generator).to(weights).requires_grad_()
    norm, x = QkNorm(weight, weight, 0.1, zero_centered), x.requires_grad_()
    y = norm.of(x, weight)

    exact_x, exact = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    right = exact_x / (exact_x.square().mean(-1, keepdim=True) + 0.1).sqrt() * (exact + zero_centered)
    torch.testing.assert_close(y.double(), right, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(y, (x, weight), dy), torch.autograd.grad(right, (exact_x, exact), dy.double())
    for ours, theirs in zip(*gradients, strict=True):
        bound = 1e-5 if ours.dtype == torch.float32 else torch.finfo(weights).eps
        torch.testing.assert_close(ours.double(), theirs, rtol=bound, atol=bound)
