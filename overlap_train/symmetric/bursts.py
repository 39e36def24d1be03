"""How long work takes in the current stream of a GPU, when other programs may use the same wire or GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

# Sockets carried 32 MiB in 4.5 to 10.8 ms within one run (2 x H200, a slow host). With one burst of each number of SMs, 8 looked
# better than 4.
_BURSTS = 4


def fastest_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few bursts of the same work."""
    return min(seconds(work, device) for _ in range(_BURSTS))


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device has done what `work` enqueues."""
    begin = time.perf_counter()
    work()
    torch.cuda.current_stream(device).synchronize()
    return time.perf_counter() - begin
