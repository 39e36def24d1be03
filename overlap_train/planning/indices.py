"""Index tensors that depend on nothing but numbers and a device: made once, and kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Make = Callable[..., torch.Tensor]  # (device, what it depends on ...)


def kept(make: Make) -> Make:
    """`make`, of which the last 32 answers are kept: 2 MB for 256 k rows.

    None is an inference tensor, which autograd would refuse in later calls. A CUDA graph makes its own: what is made while it is
    captured is there only after a replay, and what was made before may be forgotten here, and its memory used for something
    else, while the graph still reads it.
    """
    make_ordinary = torch.inference_mode(False)(make)
    known = functools.lru_cache(maxsize=32)(make_ordinary)

    @functools.wraps(make)
    def answer(device: torch.device, *numbers: Any) -> torch.Tensor:
        return (make_ordinary if is_captured(device) else known)(device, *numbers)

    return answer


def is_captured(device: torch.device) -> bool:
    """Whether what is enqueued on a device now becomes part of a CUDA graph, in which nothing can come from the CPU."""
    return device.type != "cpu" and torch.cuda.is_current_stream_capturing()
