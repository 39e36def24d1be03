"""How long a call keeps the host, where the GPU never has to be waited for: small shapes, bursts, the device idle in between.

    torchrun --nproc-per-node 2 benchmarks/probes/host_time.py

Prints microseconds of host time a call, least and median of five bursts on rank 0: one product by cuBLAS, NCCL and cuBLAS one
after the other, and for each method a gather and a scatter without gradients and both linears forward and backward.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from overlap_train import OverlapConfig, all_gather_linear, linear_reduce_scatter, shutdown

M, FEATURES = 1024, 1024  # rows of all ranks; in- and output features of one rank
CALLS, BURSTS, WARM_UP = 40, 5, 20
METHODS = ("direct", "fused", "chunked", "collective")


class Linears:
    """A column and a row linear on fixed tensors."""

    def __init__(self, device: torch.device, world: int) -> None:
        def tensor(*shape: int, grad: bool = True) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=grad)

        self.x, self.h = tensor(M // world, FEATURES), tensor(M, FEATURES)
        self.column, self.row = tensor(FEATURES, FEATURES), tensor(FEATURES, FEATURES)
        self.dy, self.dz = tensor(M, FEATURES, grad=False), tensor(M // world, FEATURES, grad=False)
        self.inputs = [self.x, self.h, self.column, self.row]

    @torch.no_grad()
    def gather(self, config: OverlapConfig) -> None:
        all_gather_linear(self.x, self.column, group=dist.group.WORLD, config=config)

    @torch.no_grad()
    def scatter(self, config: OverlapConfig) -> None:
        linear_reduce_scatter(self.h, self.row, group=dist.group.WORLD, config=config)

    def both(self, config: OverlapConfig) -> None:
        y = all_gather_linear(self.x, self.column, group=dist.group.WORLD, config=config)
        z = linear_reduce_scatter(self.h, self.row, group=dist.group.WORLD, config=config)
        torch.autograd.grad([y, z], self.inputs, [self.dy, self.dz])

    @torch.no_grad()
    def product(self) -> None:
        torch.mm(self.h, self.row)

    @torch.no_grad()
    def nccl_and_product(self) -> None:
        whole = self.x.new_empty(M, FEATURES)
        dist.all_gather_into_tensor(whole, self.x)
        torch.mm(whole, self.column)


def host_us(call: Callable[[], None]) -> tuple[float, float]:
    """(least, median) of the bursts, microseconds a call."""
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(BURSTS):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter_ns() - begin) / CALLS / 1e3)
    return min(times), statistics.median(times)


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    linears = Linears(device, dist.get_world_size())
    calls: dict[str, Callable[[], None]] = {"cuBLAS": linears.product, "NCCL + cuBLAS": linears.nccl_and_product}
    for method in METHODS:
        config = OverlapConfig(method=method)
        for name in ("gather", "scatter", "both"):
            calls[f"{method} {name}"] = partial(getattr(linears, name), config)
    for name, call in calls.items():
        least, median = host_us(call)
        if dist.get_rank() == 0:
            print(f"{name:20s} {least:7.1f} {median:7.1f}", flush=True)
    shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
