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
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

from overlap_train import OverlapConfig, all_gather_linear, linear_reduce_scatter, shutdown
from overlap_train.tools.measure.world import World

METHODS = ("low_latency", "direct", "fused", "collective")
WARM_UP = 3  # calls before a burst, which does not find them in the caches
Call = Callable[[], object]


@dataclass(frozen=True)
class Linear:
    """One linear, or both: what makes its outputs, and what autograd is given and asked for."""

    forward: Callable[[], tuple[torch.Tensor, ...]]
    inputs: tuple[torch.Tensor, ...]
    grads: tuple[torch.Tensor, ...]

    def backward(self, outputs: tuple[torch.Tensor, ...]) -> None:
        torch.autograd.grad(outputs, self.inputs, self.grads)

    def __add__(self, other: Linear) -> Linear:
        return Linear(lambda: self.forward() + other.forward(), self.inputs + other.inputs, self.grads + other.grads)


Linears = dict[str, dict[str, Linear]]  # by operator and method
Sequences = dict[tuple[str, str], Call]  # by operator and pass
Times = dict[tuple[str, str, str], list[float]]  # microseconds of each burst by operator, pass and method


def calls_of(rows: int, features: int, device: torch.device, world: int) -> tuple[Linears, Sequences]:
    """x [M/W, K], column [N/W, K]; h [M, N/W], row [K, N/W]; gradients dy [M, N/W], dz [M/W, K]; K = N/W."""

    def tensor(m: int, trained: bool = True) -> torch.Tensor:
        return torch.randn(m, features, device=device, dtype=torch.bfloat16, requires_grad=trained)

    x, w1, h, w2 = tensor(rows // world), tensor(features), tensor(rows), tensor(features)
    dy, dz, whole, dwhole = tensor(rows, False), tensor(rows // world, False), tensor(rows), tensor(rows, False)
    column = {"F.linear": Linear(lambda: (F.linear(whole, w1),), (whole, w1), (dy,))}
    row = {"F.linear": Linear(lambda: (F.linear(h, w2),), (h, w2), (dwhole,))}
    for method in METHODS:
        told = dict(group=dist.group.WORLD, config=OverlapConfig(method=method))
        column[method] = Linear(lambda told=told: (all_gather_linear(x, w1, **told),), (x, w1), (dy,))
        row[method] = Linear(lambda told=told: (linear_reduce_scatter(h, w2, **told),), (h, w2), (dz,))
    linears = {"column": column, "row": row, "both": {method: column[method] + row[method] for method in column}}
    return linears, sequence(*(one.detach() for one in (x, w1, h, w2)), dy, dz)


def sequence(
    x: torch.Tensor, w1: torch.Tensor, h: torch.Tensor, w2: torch.Tensor, dy: torch.Tensor, dz: torch.Tensor
) -> Sequences:
    """What the method `collective` does, written out: no checks, no plan, no autograd."""
    ranks = World(dist.group.WORLD, x.device, dist.get_rank(), dist.get_world_size())
    gather, scatter = ranks.gather, ranks.scatter

    def column_backward() -> object:
        whole, dx = gather(x), scatter(torch.mm(dy, w1))
        return dx, torch.mm(dy.t(), whole)

    def row_backward() -> object:
        whole = gather(dz)
        return torch.mm(whole, w2), torch.mm(whole.t(), h)

    found: Sequences = {
        ("column", "fprop"): lambda: torch.mm(gather(x), w1.t()),
        ("row", "fprop"): lambda: scatter(torch.mm(h, w2.t())),
        ("column", "bprop"): column_backward,
        ("row", "bprop"): row_backward,
    }
    for what in ("fprop", "bprop"):
        found["both", what] = lambda what=what: (found["column", what](), found["row", what]())
    return found


def measure(linears: Linears, others: Sequences, rounds: int, calls: int, device: torch.device) -> Times:
    """Everything in turn in each round, so that all see the same machine; the first round does not count."""
    times = Times()
    for turn in range(1 + rounds):
        gc.collect()
        for (operator, what), call in others.items():
            times.setdefault((operator, what, "sequence"), []).append(_burst(call, calls, device)[0])
        for operator, by_method in linears.items():
            for method, linear in by_method.items():
                forward, outputs = _burst(linear.forward, WARM_UP + calls, device)
                backward, _ = _burst(lambda: linear.backward(outputs.pop()), calls, device)  # noqa: B023
                times.setdefault((operator, "fprop", method), []).append(forward)
                times.setdefault((operator, "bprop", method), []).append(backward)
        if turn == 0:
            times.clear()
    return times


def _burst(call: Call, calls: int, device: torch.device) -> tuple[float, list]:
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
    lines = ["operator  pass   method         least  median"]
    for (operator, what, method), us in sorted(times.items()):
        lines.append(f"{operator:9s} {what:6s} {method:12s} {min(us):7.1f} {statistics.median(us):7.1f}")
    return "\n".join(lines)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    sizes = dict(rows=256, features=1024) if on_gpu else dict(rows=8, features=16)
    for name, value in (sizes | dict(rounds=7, calls=40)).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    a = parser.parse_args()
    device, group = torch.device("cpu"), nullcontext()
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timedelta(seconds=90), device_id=device)
    else:
        from stand_in_gpu import stand_in

        group = stand_in()
    with group:
        times = measure(*calls_of(a.rows, a.features, device, dist.get_world_size()), a.rounds, a.calls, device)
        if dist.get_rank() == 0:
            print(table(times), flush=True)
        shutdown()
    if on_gpu:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
