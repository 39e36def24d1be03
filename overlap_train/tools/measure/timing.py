"""Interleaved rounds of bursts, the median over rounds, the maximum over ranks.

In each round every call has its turn: one run that is not timed, then a burst between one pair of events, with nothing
in between that would align the ranks. So each call sees the same clocks, and what a call leaves behind (a rank that is
late, a stream that is still busy) is charged to the next run of the same call, as it is in training.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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


def pace(flops: float, quick: bool = False, rounds: int | None = None, burst_ms: float | None = None) -> Pace:
    """Bursts of about 4 ms of matrix products, 3 to 16 runs; flops: of one run. Every rank comes to the same answer.

    We suppose that a GPU at its power limit changes its clock more slowly than such bursts take turns. Then all calls share one
    clock, and one that takes more power than others does not look slower. In training of 70B on 4 x H200, where a turn takes
    600 ms, `chunked` was 1 % ahead of `fused`; in bursts of its MLP it was 0.7 % behind.

    rounds: how many; by default 5, with `quick` 3. burst_ms: how long a burst is, with as many runs as it takes.
    """
    runs_per_ms = 1e9 * H200.sustained_tflops / flops  # about
    burst = min(16, max(3, round(4 * runs_per_ms)))
    usual = Pace(3, max(2, burst // 2)) if quick else Pace(5, burst)
    return Pace(rounds or usual.rounds, max(3, round(burst_ms * runs_per_ms)) if burst_ms else usual.burst)


def input_sets(nbytes: int) -> int:
    """How many input sets to rotate among, at most 8: none is still in the L2 cache (60 MiB) when its turn comes again."""
    return min(8, -(-(120 << 20) // nbytes))


def measure(calls: Mapping[str, Call], pace: Pace, group: dist.ProcessGroup, device: torch.device) -> dict[str, Timing]:
    """Time every call. Collective: all ranks pass the same calls in the same order."""
    samples: dict[str, list[Timing]] = {name: [] for name in calls}
    names, burst = list(calls), _device_burst if device.type == "cuda" else _host_burst
    for turn in range(pace.rounds):
        dist.barrier(group)
        for name in order_of(names, turn):
            samples[name].append(burst(calls[name], pace.burst))
    return worst_over_ranks({name: median(timings) for name, timings in samples.items()}, group, device)


def order_of(names: Sequence[str], turn: int) -> list[str]:
    """The order of one round, the same on all ranks. Nobody always follows the same neighbour: at M = 128 `auto`, after a
    baseline, took 6 % longer than the same method by its name, after `auto`."""
    return random.Random(turn).sample(names, len(names))


def median(timings: list[Timing]) -> Timing:
    """The median Timing, of each figure on its own."""
    return Timing(statistics.median(t.ms for t in timings), statistics.median(t.host_us for t in timings))


def worst_over_ranks(timings: dict[str, Timing], group: dist.ProcessGroup, device: torch.device) -> dict[str, Timing]:
    """The slowest rank's figures, on every rank."""
    table = torch.tensor([[t.ms, t.host_us] for t in timings.values()], dtype=torch.float64, device=device)
    dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
    return {name: Timing(ms, host_us) for name, (ms, host_us) in zip(timings, table.tolist(), strict=True)}


def _device_burst(call: Call, count: int) -> Timing:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call(count)
    start.record()
    before = time.perf_counter()
    for index in range(count):
        call(index)
    host = time.perf_counter() - before
    end.record()
    torch.cuda.synchronize()  # the queue is empty before the next burst: its host time holds no waiting for room
    return Timing(start.elapsed_time(end) / count, host / count * 1e6)


def _host_burst(call: Call, count: int) -> Timing:
    call(count)
    before = time.perf_counter()
    for index in range(count):
        call(index)
    host = time.perf_counter() - before
    return Timing(host / count * 1e3, host / count * 1e6)
