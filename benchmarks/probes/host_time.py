"""How long a call keeps the host, where the GPU never has to be waited for: small shapes, bursts, the device idle in between.

    torchrun --standalone --nproc-per-node 2 benchmarks/probes/host_time.py
    python benchmarks/probes/host_time.py                                     without a GPU (stand_in_gpu.py)

Prints microseconds of host time a call on rank 0, the least and the median of the bursts, of each operator and pass:

    low_latency, direct, ...   by that method: forward, and backward
    F.linear                   torch's, with all of x
    sequence                   torch.distributed and torch.mm, one after the other: neither checks nor autograd

"both" is a column and a row linear. Compare that: backwards of column linears in a row take barriers, which "both" does not need.
On a machine that others use, take many short bursts and the least of them: `--rounds 300 --calls 12`.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from host_calls import Operands, linears_of, operands_of, sequence

from overlap_train import shutdown

WARM_UP = 3  # calls before a burst, which does not find them in the caches


@dataclass(frozen=True)
class Pace:
    """How many rounds, in each of which everything has a burst of so many calls."""

    rounds: int
    calls: int


Times = dict[tuple[str, str, str], list[float]]  # microseconds of each burst by operator, pass and method


def measure(o: Operands, pace: Pace, device: torch.device) -> Times:
    """Everything in turn in each round, so that all see the same machine; the first round does not count."""
    linears, times = linears_of(o), Times()
    calls = {(*place, "sequence"): call for place, call in sequence(o).items()}
    for turn in range(1 + pace.rounds):
        gc.collect()
        for place, call in calls.items():
            times.setdefault(place, []).append(_burst(call, pace.calls, device)[0])
        for operator, by_method in linears.items():
            for method, linear in by_method.items():
                forward, outputs = _burst(linear.forward, WARM_UP + pace.calls, device)
                backward, _ = _burst(lambda: linear.backward(outputs.pop()), pace.calls, device)  # noqa: B023
                times.setdefault((operator, "fprop", method), []).append(forward)
                times.setdefault((operator, "bprop", method), []).append(backward)
        if turn == 0:
            times.clear()
    return times


def _burst(call: Callable[[], object], calls: int, device: torch.device) -> tuple[float, list]:
    """Microseconds a call, and what the calls returned."""
    found = [call() for _ in range(WARM_UP)]
    if device.type == "cuda":
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
    gc.disable()
    begin = time.perf_counter_ns()
    found += [call() for _ in range(calls)]
    us = (time.perf_counter_ns() - begin) / calls / 1e3
    gc.enable()
    return us, found


def table(times: Times) -> str:
    lines = ["operator  pass   method         least  median  over F.linear"]
    for (operator, pass_, method), us in sorted(times.items()):
        beside = times.get((operator, pass_, "F.linear"))
        ratio = f"{min(us) / min(beside):9.2f}" if beside else ""
        lines.append(
            f"{operator:9s} {pass_:6s} {method:12s} {min(us):7.1f} {statistics.median(us):7.1f} {ratio}".rstrip()
        )
    return "\n".join(lines)


def started(on_gpu: bool) -> AbstractContextManager[object]:
    """The process group of all ranks, or the stand-in for one."""
    if not on_gpu:
        from stand_in_gpu import stand_in

        return stand_in()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=90), device_id=device)
    return nullcontext()


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    sizes = dict(rows=256, features=1024) if on_gpu else dict(rows=8, features=16)
    for name, value in (sizes | dict(rounds=7, calls=40)).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    a = parser.parse_args()
    with started(on_gpu):
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        o = operands_of(a.rows, a.features, device, dist.get_world_size())
        times = measure(o, Pace(a.rounds, a.calls), device)
        if dist.get_rank() == 0:
            print(table(times), flush=True)
        shutdown()
    if on_gpu:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
