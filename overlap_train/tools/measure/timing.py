"""Interleaved rounds of bursts, the median over rounds, the maximum over ranks.

In each round every call has its turn: one run that is not timed, then a burst between one pair of events, with nothing
in between that would align the ranks. So each call sees the same clocks, and what a call leaves behind (a rank that is
late, a stream that is still busy) is charged to the next run of the same call, as it is in training.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist

from ...select.system import H200

Call = Callable[[int], object]  # takes the index of the run, which picks the input set


@dataclass(frozen=True)
class Pace:
    """How many rounds, and how many runs a burst has."""

    rounds: int
    burst: int


@dataclass(frozen=True)
class Timing:
    """The times of one run. ms: on the device (on the CPU: wall clock). host_us: until the call returned to Python."""

    ms: float
    host_us: float


def pace(flops: float, quick: bool, on_gpu: bool) -> Pace:
    """Bursts of about 4 ms of matrix products, 3 to 16 runs, and more rounds of shorter ones; flops: of one run. Every rank comes
    to the same answer. In CPU processes `quick` tries the code and measures nothing.

    We suppose that a GPU at its power limit changes its clock more slowly than such bursts take turns: then all calls share one
    clock (benchmarks/notes.md).
    """
    burst = min(16, max(3, round(4e9 * H200.sustained_tflops / flops)))
    if quick:
        return Pace(3, max(2, burst // 2)) if on_gpu else Pace(1, 2)
    return Pace(15 if burst == 16 else 5, burst)  # such calls vary more, and take milliseconds a round


def input_sets(nbytes: int) -> int:
    """How many input sets to rotate among, at most 8: none is still in the L2 cache (60 MiB) when its turn comes again."""
    return min(8, -(-(120 << 20) // nbytes))


def measure(calls: Mapping[str, Call], pace: Pace, group: dist.ProcessGroup, device: torch.device) -> dict[str, Timing]:
    """Time every call. Collective: all ranks pass the same calls in the same order.

    Rounds have random orders, the same on all ranks: at M = 128 `auto`, always after a baseline, took 6 % longer than the same
    method by its name, always after `auto`.
    """
    samples: dict[str, list[Timing]] = {name: [] for name in calls}
    for turn in range(pace.rounds):
        dist.barrier(group)
        for name in random.Random(turn).sample(list(calls), len(calls)):
            samples[name].append(_burst(calls[name], pace.burst, device.type == "cuda"))
    medians = [
        [statistics.median(times) for times in zip(*map(astuple, some), strict=True)] for some in samples.values()
    ]
    table = torch.tensor(medians, dtype=torch.float64, device=device)
    dist.all_reduce(table, dist.ReduceOp.MAX, group=group)  # the slowest rank's
    return {name: Timing(ms, host_us) for name, (ms, host_us) in zip(calls, table.tolist(), strict=True)}


def _burst(call: Call, count: int, on_gpu: bool) -> Timing:
    start, end = (torch.cuda.Event(enable_timing=True) if on_gpu else None for _ in range(2))
    call(count)
    if start:
        start.record()
    before = time.perf_counter()
    for index in range(count):
        call(index)
    host = time.perf_counter() - before
    if not (start and end):
        return Timing(host / count * 1e3, host / count * 1e6)
    end.record()
    torch.cuda.synchronize()  # the queue is empty before the next burst: its host time holds no waiting for room
    return Timing(start.elapsed_time(end) / count, host / count * 1e6)
