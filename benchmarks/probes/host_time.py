"""How long a call keeps the host, where the GPU never has to be waited for: small shapes, bursts, the device idle in between.

    torchrun --standalone --nproc-per-node 2 benchmarks/probes/host_time.py

Prints microseconds of host time a call, on the slowest rank, the median burst: of a column linear's forward, a row linear's, and
forward and backward of both:

    low_latency, direct, ...   by that method
    F.linear                   torch's, with all of x
    sequence                   torch.distributed and torch.mm, one after the other: neither checks nor autograd, forward only

On a machine that others use, take many short bursts: `--rounds 300 --calls 12`. CPU processes only try the code.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from overlap_train import OverlapConfig, all_gather_linear, linear_reduce_scatter, shutdown
from overlap_train.tools.bench.layers import gradients
from overlap_train.tools.measure.timing import Call, Pace, measure
from overlap_train.tools.measure.world import World, join

METHODS = {"cuda": ("low_latency", "direct", "fused", "collective"), "cpu": ("chunked", "collective")}


def calls_of(rows: int, features: int, here: World) -> dict[str, Call]:
    """x [M/W, K], column [N/W, K]; h [M, N/W], row [K, N/W]; gradients dy [M, N/W], dz [M/W, K]; K = N/W."""

    def tensor(m: int, trained: bool = True) -> torch.Tensor:
        return torch.randn(m, features, device=here.device, dtype=torch.bfloat16, requires_grad=trained)

    x, w1, h, w2 = tensor(rows // here.size), tensor(features), tensor(rows), tensor(features)
    dy, dz, whole, dwhole = tensor(rows, False), tensor(rows // here.size, False), tensor(rows), tensor(rows, False)
    found: dict[str, Call] = {}

    def add(name: str, column: Any, row: Any, x: torch.Tensor, dz: torch.Tensor) -> None:
        found[f"column {name}"] = lambda index: column(x, w1)
        found[f"row {name}"] = lambda index: row(h, w2)
        found[f"both {name}"] = lambda index: gradients([column(x, w1), row(h, w2)], [x, w1, h, w2], [dy, dz])

    for method in METHODS[here.device.type]:
        told: Any = dict(group=here.group, config=OverlapConfig(method=method))
        add(method, partial(all_gather_linear, **told), partial(linear_reduce_scatter, **told), x, dz)
    add("F.linear", F.linear, F.linear, whole, dwhole)
    shard, w1_t, own, w2_t = x.detach(), w1.detach().t(), h.detach(), w2.detach().t()
    found["column sequence"] = lambda index: torch.mm(here.gather(shard), w1_t)
    found["row sequence"] = lambda index: here.scatter(torch.mm(own, w2_t))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, value in dict(rows=256, features=1024, rounds=7, calls=40).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    a = parser.parse_args()
    here = join("torchrun --standalone --nproc-per-node 2 benchmarks/probes/host_time.py")
    timings = measure(calls_of(a.rows, a.features, here), Pace(a.rounds, a.calls), here.group, here.device)
    for name, timing in sorted(timings.items()):
        here.say(f"{name:20s} {timing.host_us:7.1f}")
    shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
