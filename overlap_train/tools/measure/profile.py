"""What a GPU did, from torch's profiler: each kernel and copy as a span of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

Span = dict[str, Any]  # name, stream, start and end in microseconds, and kind where it is known
Interval = tuple[float, float]  # start and end


def spans_of(work: Callable[[], object]) -> list[Span]:
    """Everything on the device while `work` runs, in the order of starts."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events = [e for e in profiler.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]
    spans = [
        {"name": e.name(), "stream": e.device_resource_id(), "start": e.start_ns() / 1e3, "end": e.end_ns() / 1e3}
        for e in events
    ]
    return sorted(spans, key=lambda span: span["start"])


def union(spans: Iterable[Span]) -> list[Interval]:
    """The intervals in which any of these runs; they do not touch."""
    merged: list[Interval] = []
    for start, end in sorted((span["start"], span["end"]) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def total(intervals: Iterable[Interval]) -> float:
    """How long they are together."""
    return sum(end - start for start, end in intervals)
