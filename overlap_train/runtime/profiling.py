"""Named ranges around what the operators enqueue, for torch.profiler and Nsight Systems."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

OUTSIDE: AbstractContextManager[Any] = nullcontext()
is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled


def profiled(name: str) -> AbstractContextManager[Any]:
    """The range overlap_train/<name>, as in overlap_train/fc1/fprop, while torch.profiler or emit_nvtx is on. Half a microsecond
    otherwise."""
    return torch.profiler.record_function(f"overlap_train/{name}") if is_profiling() else OUTSIDE
