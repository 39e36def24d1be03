"""An autograd function's `apply`, at no cost where no transform of torch.func is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`. Its half in Python looks for torch.func's wrappers in every argument, which takes 2.4 of 7 microseconds.
    Inside of torch.func's transforms it refuses the function by name; outside of them its half in C++ does all the work."""
    in_c: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(*arguments: Any) -> Any:
        return (function.apply if torch._C._are_functorch_transforms_active() else in_c)(*arguments)

    return apply
