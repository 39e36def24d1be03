"""What `applied` leaves out of torch's `apply`: nothing that a caller could notice."""

from __future__ import annotations

from typing import Any

import pytest
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


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
def test_transforms_of_torch_func_are_refused_as_torch_refuses_them(transform: Any) -> None:
    """Not by the assertion in its C++ half, which asks for a bug report."""
    with pytest.raises(RuntimeError, match="it must override the setup_context"):
        transform(lambda x: applied(Squared)(x, 2))(torch.ones(3))
