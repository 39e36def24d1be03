"""torch.autograd.Function at less host time: what torch does on each call for transforms that nobody uses is left out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable as refusing


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`. Its half in Python looks for torch.func's wrappers in every argument, which takes 2.4 of 7 microseconds.
    Inside of torch.func's transforms it refuses the function by name; outside of them its half in C++ does all the work."""
    in_c: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(*arguments: Any) -> Any:
        return (function.apply if torch._C._are_functorch_transforms_active() else in_c)(*arguments)

    return apply


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator for a backward that cannot be differentiated. It switches gradients off and on again, 2.5 microseconds:
    here only where they are on (create_graph=True)."""
    refused = refusing(backward)

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        return (refused if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return once
