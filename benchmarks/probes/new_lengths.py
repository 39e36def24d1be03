"""What a length that was never seen costs a training step, against the same length seen before.

    torchrun --standalone --nproc-per-node 2 benchmarks/probes/new_lengths.py --method direct --lengths 1000

A step is forward and backward of some MLPs, a column and a row linear each. Steps follow each other without a pause, as in
training, 20 lengths four times: the first time they are new, the fourth time they have been seen in every slot. Prints medians of
milliseconds a step, of the device and of the host, and how often ranks agreed and kernels were loaded after the first step.
`--method collective` shows what new lengths cost torch's own products and NCCL. On CPU processes it runs by `chunked`.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist

from overlap_train import OverlapConfig, all_gather_linear, linear_reduce_scatter, shutdown
from overlap_train.group.registry import made_domain

TIMES = 4  # each length: three slots, and one more
GROUP = 20  # lengths: a step of each, then all of them again


@dataclass(frozen=True)
class Model:
    """w1 [inner/W, hidden] and w2 [hidden, inner/W] of each layer."""

    layers: list[tuple[torch.nn.Parameter, torch.nn.Parameter]]
    config: OverlapConfig

    def step(self, x_shard_m: torch.Tensor) -> None:
        """Forward and backward; x_shard_m [M/W, hidden]."""
        shared, y = dict(group=dist.group.WORLD, config=self.config), x_shard_m
        for number, (w1, w2) in enumerate(self.layers):
            inner = all_gather_linear(y, w1, name=f"layers.{number}.fc1", **shared)
            y = linear_reduce_scatter(inner, w2, name=f"layers.{number}.fc2", **shared)
        y.backward(torch.ones_like(y))


def model_of(a: argparse.Namespace, device: torch.device) -> Model:
    dtype, inner = torch.bfloat16 if device.type == "cuda" else torch.float32, a.inner // dist.get_world_size()
    config = OverlapConfig(method=a.method if device.type == "cuda" else "chunked")

    def weight(n: int, k: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.randn(n, k, device=device, dtype=dtype) / k**0.5)

    return Model([(weight(inner, a.hidden), weight(a.hidden, inner)) for _ in range(a.layers)], config)


@dataclass(frozen=True)
class Run:
    """Milliseconds of a step: from the end of the one before to its own end on the device, and until the host has launched it."""

    ms: float
    host_ms: float


def measure(model: Model, a: argparse.Namespace, device: torch.device) -> list[list[Run]]:
    """The runs of each length."""
    world, found = dist.get_world_size(), []
    lengths = random.Random(0).sample(range(a.shortest // world, a.longest // world), a.lengths)
    for first in range(0, len(lengths), GROUP):
        group = lengths[first : first + GROUP]
        passes = [steps(model, [a.longest // world, *group], a.hidden, device) for _ in range(TIMES)]
        found += [list(runs) for runs in zip(*passes, strict=True)]
    return found


def steps(model: Model, lengths: list[int], hidden: int, device: torch.device) -> list[Run]:
    """One step of each length, the first of which only keeps the device busy."""
    dtype, ends, launched = model.layers[0][0].dtype, [], []
    inputs = [torch.randn(rows, hidden, device=device, dtype=dtype, requires_grad=True) for rows in lengths]
    synchronize(device)
    for x in inputs:
        begin = time.perf_counter()
        model.step(x)
        launched.append(1e3 * (time.perf_counter() - begin))
        ends.append(now(device))
    synchronize(device)
    return [Run(between(*pair), host) for pair, host in zip(pairwise(ends), launched[1:], strict=True)]


def now(device: torch.device) -> torch.cuda.Event | float:
    """The end of what was launched so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(begin: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return 1e3 * (end - begin)
    return begin.elapsed_time(end)  # type: ignore[union-attr]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def counts() -> tuple[int, int]:
    """How often ranks have agreed, and how many kernels have been loaded."""
    domain = made_domain(dist.group.WORLD)
    assert domain is not None
    return domain.agreement._number, 0 if domain.launcher is None else len(domain.launcher.entries)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--method", default="auto")
    for name, value in dict(lengths=1000, shortest=2048, longest=8192, layers=4, hidden=4096, inner=14336).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    a = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=5))
    model = model_of(a, device)
    for _ in range(TIMES):
        model.step(
            torch.randn(a.longest // dist.get_world_size(), a.hidden, device=device, dtype=model.layers[0][0].dtype)
        )
    before, found = counts(), measure(model, a, device)
    agreed, loaded = (after - was for after, was in zip(counts(), before, strict=True))
    new, known = (statistics.median(runs[place].ms for runs in found) for place in (0, TIMES - 1))
    new_host, known_host = (statistics.median(runs[place].host_ms for runs in found) for place in (0, TIMES - 1))
    slowest = max(runs[0].ms for runs in found)
    if dist.get_rank() == 0:
        print(
            f"{a.method}: new {new:.2f} ms (slowest {slowest:.2f}), known {known:.2f} ms, {100 * (new / known - 1):+.1f} %; "
            f"of the host {new_host:.2f} and {known_host:.2f} ms"
        )
        print(f"after the first steps: {agreed} agreements, {loaded} kernels loaded")
    shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
