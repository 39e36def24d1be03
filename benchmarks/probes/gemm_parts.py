"""What it costs to multiply the rows of a product in parts.

    python benchmarks/probes/gemm_parts.py

x [4096, 8192] @ w.T for two weights [N, 8192], by cuBLAS in bf16, in 1 to 16 products of equally many rows, on all SMs and on the
130 that NCCL leaves. Also in eight parts with both halves of the features apart, added in fp32. In turns; medians of five, in
milliseconds, and over the whole product.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch

from overlap_train.gpu.driver import Blas

ROWS, FEATURES, COLUMNS = 4096, 8192, (173056, 345600)
PARTS, ROUNDS, CALLS = (1, 2, 4, 8, 16), 5, 4
NETWORK_SMS = 2


def in_parts(x: torch.Tensor, b_kn: torch.Tensor, y: torch.Tensor, parts: int) -> None:
    for rows, into in zip(x.chunk(parts), y.chunk(parts), strict=True):
        torch.mm(rows, b_kn, out=into)


def in_halves(x: torch.Tensor, b_kn: torch.Tensor, y: torch.Tensor, parts: int) -> None:
    """Both halves of the features apart: their sum in fp32, and a copy of it."""
    half = FEATURES // 2
    for rows, into in zip(x.chunk(parts), y.chunk(parts), strict=True):
        total = torch.mm(rows[:, :half], b_kn[:half], out_dtype=torch.float32)
        torch.addmm(total, rows[:, half:], b_kn[half:], out_dtype=torch.float32, out=total)
        into.copy_(total)


def milliseconds(call: Callable[[], None], blas: Blas, spared: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with blas.sparing(spared):
        call()
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / CALLS


def measure(columns: int, device: torch.device) -> None:
    x, w, y = (
        torch.randn(*shape, device=device, dtype=torch.bfloat16)
        for shape in ((ROWS, FEATURES), (columns, FEATURES), (ROWS, columns))
    )
    calls = {f"{parts} part{'s' * (parts > 1)}": partial(in_parts, x, w.t(), y, parts) for parts in PARTS}
    calls["8 parts in halves"] = partial(in_halves, x, w.t(), y, 8)
    ways = {(name, spared): call for spared in (0, NETWORK_SMS) for name, call in calls.items()}
    times: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
    blas = Blas(device)
    for _ in range(ROUNDS):
        for (name, spared), call in ways.items():
            times[name, spared].append(milliseconds(call, blas, spared))
    whole = statistics.median(times["1 part", 0])
    for (name, spared), found in times.items():
        median = statistics.median(found)
        print(f"N={columns}, {name}, {spared} SMs spared: {median:.2f} ms, {median / whole:.3f}", flush=True)


if __name__ == "__main__":
    for n in COLUMNS:
        measure(n, torch.device("cuda"))
