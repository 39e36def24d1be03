"""Times of GEMM + RS beside its product alone, of shapes whose last wave of tiles is more or less full, to compare two versions.

    torchrun --standalone --nproc-per-node 2 benchmarks/probes/last_wave.py [LABEL]

Run it in turns with either version of overlap_train on the path. Prints the median of seven bursts, on the slower rank.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from overlap_train import OverlapConfig, linear_reduce_scatter, shutdown

# (M, N, K): 1.2, 2.4, 2.4, 3.9, 7.8, 15.5 tiles of 128 x 256 for each of 132 SMs
SHAPES = [
    (1024, 5120, 25600), (2048, 5120, 25600), (2048, 5120, 5120), (4096, 4096, 14336), (8192, 4096, 14336),
    (8192, 8192, 28672),
]  # fmt: skip
METHODS = ("fused", "direct")
BURSTS, CALLS = 7, 20


def burst_ms(call: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / CALLS


@torch.no_grad()
def measure(m: int, n: int, k: int) -> list[float]:
    """Milliseconds of the product alone and of each method."""
    k_shard = k // dist.get_world_size()
    x, w = (torch.randn(rows, k_shard, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    calls: list[Callable[[], object]] = [lambda: torch.mm(x, w.t())]
    for method in METHODS:
        config = OverlapConfig(method=method, symmetric_mib=600)
        calls.append(partial(linear_reduce_scatter, x, w, group=dist.group.WORLD, config=config))
    for call in calls * 3:
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(BURSTS):
        for call, found in zip(calls, times, strict=True):
            torch.cuda.synchronize()
            dist.barrier()
            found.append(burst_ms(call))
    slowest = torch.tensor([statistics.median(found) for found in times], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    for m, n, k in SHAPES:
        product, *ours = measure(m, n, k)
        shown = ", ".join(
            f"{method} {ms * 1e3:.0f} ({ms / product:.3f})" for method, ms in zip(METHODS, ours, strict=True)
        )
        if rank == 0:
            tiles = -(-m // 128) * -(-n // 256)
            print(
                *sys.argv[1:],
                f"{m} x {n} x {k}, {tiles / 132:.2f} waves: product {product * 1e3:.0f} us, {shown}",
                flush=True,
            )
    shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
