"""What a kernel is compiled for: launches whose arguments are of equal kinds run the same binary.

Triton works this out at every launch and warm-up: 0.24 ms for the 30 arguments of our kernels, 2 ms of a step of four MLPs whose
length is new (H200's host, under cProfile). Our kinds are at least as fine as Triton's. If they are finer, Triton is asked more
often than it need be.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

_ALIGNMENT = 16  # of addresses and numbers, as Triton looks at them


def kinds(arguments: Mapping[str, Any], constants: Mapping[str, Any]) -> Hashable:
    """The kinds of a launch's arguments, and its constexprs and launch options."""
    return tuple((name, _kind(value)) for name, value in arguments.items()), tuple(constants.items())


def _kind(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % _ALIGNMENT == 0
    if type(value) is int:  # 1 becomes a constexpr; more than 31 and 63 bits take wider integers
        bits = value.bit_length()
        return int, value == 1, value % _ALIGNMENT == 0, bits > 31, bits > 63, value < 0
    if hasattr(value, "block_shape"):  # a tensor descriptor
        layout, padding = getattr(value, "layout", None), getattr(value, "padding", None)
        return type(value), value.base.dtype, tuple(value.block_shape), layout, padding
    return type(value), value
