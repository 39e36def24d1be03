"""How long a call keeps the host, where the GPU never has to be waited for: small shapes, bursts, the device idle in between.

    torchrun --standalone --nproc-per-node 2 benchmarks/probes/host_time.py
    python benchmarks/probes/host_time.py                                     without a GPU (stand_in_gpu.py)

Prints microseconds of host time a call on rank 0, the least and the median of the bursts, of each operator and pass:

    low_latency, direct, ...   by that method, forward and backward by autograd
    F.linear                   torch's, with all of x, forward and backward by autograd
    sequence                   torch.distributed and torch.mm, one after the other: neither checks nor autograd

"both" is a column and a row linear. Compare that: backwards of column linears in a row take barriers, which "both" does not need.
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
import torch.nn.functional as F

from overlap_train import OverlapConfig, all_gather_linear, linear_reduce_scatter, shutdown

METHODS = ("low_latency", "direct", "fused", "collective")
Forward = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Operands:
    """x [M/W, K], column [N/W, K]; h [M, N/W], row [K, N/W]; gradients dy [M, N/W], dz [M/W, K]."""

    x: torch.Tensor
    column: torch.Tensor
    h: torch.Tensor
    row: torch.Tensor
    dy: torch.Tensor
    dz: torch.Tensor
    whole: torch.Tensor  # x of all ranks
    dwhole: torch.Tensor  # the gradient of a row linear without a reduction

    @property
    def world(self) -> int:
        return len(self.whole) // len(self.x)


def operands_of(rows: int, features: int, device: torch.device, world: int) -> Operands:
    def tensor(m: int, n: int, trained: bool = True) -> torch.Tensor:
        return torch.randn(m, n, device=device, dtype=torch.bfloat16, requires_grad=trained)

    shard, inner = rows // world, features
    x, column, h, row = tensor(shard, features), tensor(inner, features), tensor(rows, inner), tensor(features, inner)
    dy, dz = tensor(rows, inner, False), tensor(shard, features, False)
    return Operands(x, column, h, row, dy, dz, tensor(rows, features), tensor(rows, features, False))


@dataclass(frozen=True)
class Case:
    """One operator, or both: what makes its outputs, and what autograd is given and asked for."""

    forward: Forward
    inputs: tuple[torch.Tensor, ...]
    grads: tuple[torch.Tensor, ...]

    def backward(self, outputs: tuple[torch.Tensor, ...]) -> None:
        torch.autograd.grad(outputs, self.inputs, self.grads)

    def __add__(self, other: Case) -> Case:
        return Case(lambda: self.forward() + other.forward(), self.inputs + other.inputs, self.grads + other.grads)


def linears_of(o: Operands) -> dict[str, dict[str, Case]]:
    """By operator and method."""
    found: dict[str, dict[str, Case]] = {"column": {}, "row": {}}
    for method in METHODS:
        said = dict(group=dist.group.WORLD, config=OverlapConfig(method=method))
        found["column"][method] = Case(
            lambda said=said: (all_gather_linear(o.x, o.column, **said),), (o.x, o.column), (o.dy,)
        )
        found["row"][method] = Case(
            lambda said=said: (linear_reduce_scatter(o.h, o.row, **said),), (o.h, o.row), (o.dz,)
        )
    found["column"]["F.linear"] = Case(lambda: (F.linear(o.whole, o.column),), (o.whole, o.column), (o.dy,))
    found["row"]["F.linear"] = Case(lambda: (F.linear(o.h, o.row),), (o.h, o.row), (o.dwhole,))
    found["both"] = {method: found["column"][method] + found["row"][method] for method in found["column"]}
    return found


@dataclass(frozen=True)
class Sequence:
    """What the method `collective` does, written out: no checks, no plan, no autograd."""

    o: Operands

    def passes(self) -> dict[tuple[str, str], Callable[[], object]]:
        both = {"fprop": (self.column, self.row), "bprop": (self.column_backward, self.row_backward)}
        found: dict[tuple[str, str], Callable[[], object]] = {}
        for what, (column, row) in both.items():
            found["column", what], found["row", what] = column, row
            found["both", what] = lambda column=column, row=row: (column(), row())
        return found

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        whole = shard.new_empty(len(shard) * self.o.world, shard.shape[1])
        dist.all_gather_into_tensor(whole, shard)
        return whole

    def scatter(self, partial: torch.Tensor) -> torch.Tensor:
        y = partial.new_empty(len(partial) // self.o.world, partial.shape[1])
        dist.reduce_scatter_tensor(y, partial)
        return y

    @torch.no_grad()
    def column(self) -> object:
        return torch.mm(self.gather(self.o.x), self.o.column.t())

    @torch.no_grad()
    def row(self) -> object:
        return self.scatter(torch.mm(self.o.h, self.o.row.t()))

    @torch.no_grad()
    def column_backward(self) -> object:
        whole, dx = self.gather(self.o.x), self.scatter(torch.mm(self.o.dy, self.o.column))
        return dx, torch.mm(self.o.dy.t(), whole)

    @torch.no_grad()
    def row_backward(self) -> object:
        whole = self.gather(self.o.dz)
        return torch.mm(whole, self.o.row), torch.mm(whole.t(), self.o.h)


@dataclass(frozen=True)
class Pace:
    """How many rounds, in each of which everything has a burst of so many calls."""

    rounds: int
    calls: int


Times = dict[tuple[str, str, str], list[float]]  # microseconds of each burst by operator, pass and method


def measure(o: Operands, pace: Pace, device: torch.device) -> Times:
    """Everything in turn in each round, so that all see the same machine; the first round does not count."""
    linears, sequence, times = linears_of(o), Sequence(o).passes(), Times()
    for turn in range(1 + pace.rounds):
        for operator, by_method in linears.items():
            for method, case in by_method.items():
                forward, outputs = _burst(case.forward, pace.calls, device)
                backward, _ = _burst(
                    lambda case=case, outputs=outputs: case.backward(outputs.pop()), pace.calls, device
                )
                for pass_, us in (("fprop", forward), ("bprop", backward)):
                    times.setdefault((operator, pass_, method), []).append(us)
        for (operator, pass_), call in sequence.items():
            times.setdefault((operator, pass_, "sequence"), []).append(_burst(call, pace.calls, device)[0])
        if turn == 0:
            times.clear()
    return times


def _burst(call: Callable[[], object], calls: int, device: torch.device) -> tuple[float, list]:
    """Microseconds a call, and what the calls returned."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
    gc.collect()
    gc.disable()
    found, begin = [], time.perf_counter_ns()
    for _ in range(calls):
        found.append(call())
    us = (time.perf_counter_ns() - begin) / calls / 1e3
    gc.enable()
    return us, found


def table(times: Times) -> str:
    lines = ["operator  pass   method         least  median  over F.linear"]
    for (operator, pass_, method), us in sorted(times.items()):
        ratio = min(us) / min(times[operator, pass_, "F.linear"])
        lines.append(f"{operator:9s} {pass_:6s} {method:12s} {min(us):7.1f} {statistics.median(us):7.1f} {ratio:9.2f}")
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
