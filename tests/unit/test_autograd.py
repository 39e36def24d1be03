"""What `applied` leaves out of torch's `apply`: nothing that a caller could notice."""

from __future__ import annotations

from typing import Any

import torch

from overlap_train.linear import applied


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, power: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**power

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 2 * ctx.saved_tensors[0] * dy, None


def test_it_computes_and_is_differentiated_as_torchs() -> None:
    x = torch.arange(4.0, requires_grad=True)
    y = applied(Squared)(x, 2)
    assert torch.equal(y, x**2) and type(y.grad_fn) is type(Squared.apply(x, 2).grad_fn)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], 2 * x)
