"""Would the Hopper kernel be faster with other tiles? AG + GEMM for one rank (nothing to wait for) against cuBLAS.

    python benchmarks/probes/gemm_shapes.py

Candidates take turns, in bursts of 8 ms, so that all see the same clocks. Prints the median in microseconds by GROUP_M (rows of
tiles that share columns) x BLOCK_N; ours include 2 to 3 for setting a counter to 0.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import torch

from overlap_train.kernels.hopper_all_gather_gemm import hopper_all_gather_gemm_kernel as kernel
from overlap_train.operators import hopper
from overlap_train.operators.chunking import multiprocessors

# M, N, K, and whether b lies as [N, K], as in forward
SHAPES = (
    (8192, 2752, 4096, True), (8192, 3584, 4096, True), (8192, 3584, 4096, False), (8192, 7168, 8192, True),
    (8192, 7392, 8192, True), (8192, 13312, 16384, True), (8192, 1536, 4096, True), (4096, 7168, 4096, True),
    (4096, 3584, 4096, True),
)  # fmt: skip
TILES = ((4, 256), (8, 256), (16, 256), (8, 128))  # GROUP_M, BLOCK_N
STAGES = {256: 4, 128: 6}  # that fit beside the buffers of two quarter tiles
BURST_US, ROUNDS = 8e3, 7


def ours(a: torch.Tensor, b_kn: torch.Tensor, y: torch.Tensor, words: torch.Tensor, group_m: int, block_n: int) -> None:
    """y [M, N] = a [M, K] @ b_kn [K, N]. words: int64 [>= 8], for the tile counter and what a single rank never reads."""
    (m, k), n, block_k = a.shape, y.shape[1], hopper.BLOCK_K
    words.zero_()
    is_nk = b_kn.stride(0) == 1
    panel, out = hopper._descriptor(a, hopper.BLOCK_M, block_k), hopper._descriptor(y, hopper.PART_M, block_n // 2)
    kernel[(multiprocessors(a.device),)](
        panel, panel, hopper._operand(b_kn, block_n), hopper._operand(b_kn, block_n // 2), out, y, m, n, k,
        rank=0, counter_ptr=words[:1], signals_ptr=words[1:], epoch_ptr=words[2:], abort_ptr=words[4:], record_ptr=words[6:],
        tag=0, limit=1 << 40, WORLD=1, CHUNKS=1, BLOCK_M=hopper.BLOCK_M, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=group_m,
        STAGES=STAGES[block_n], B_IS_NK=is_nk, WHOLE_TILES=True, **hopper._LAUNCH,
    )  # fmt: skip


def burst_us(call: Callable[[], object], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count * 1e3


def medians_us(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    count = max(4, int(BURST_US / burst_us(calls["cuBLAS"], 10)))
    rounds = [{name: burst_us(call, count) for name, call in calls.items()} for _ in range(ROUNDS)]
    return {name: statistics.median(one[name] for one in rounds) for name in calls}


def main() -> None:
    words = torch.zeros(16, dtype=torch.int64, device="cuda")
    for m, n, k, is_nk in SHAPES:
        a, y = (torch.randn(m, width, device="cuda", dtype=torch.bfloat16) for width in (k, n))
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        b_kn = b.t() if is_nk else b.t().contiguous()
        expected = a @ b_kn
        calls: dict[str, Callable[[], object]] = {"cuBLAS": functools.partial(torch.mm, a, b_kn, out=y)}
        for group_m, block_n in TILES:
            call = functools.partial(ours, a, b_kn, y.fill_(7), words, group_m, block_n)
            call()
            torch.testing.assert_close(y, expected, rtol=2e-2, atol=1.0)
            calls[f"{group_m} x {block_n}"] = call
        figures = ", ".join(f"{name} {us:.0f}" for name, us in medians_us(calls).items())
        print(f"{m} x {n} x {k}, b as {'[N, K]' if is_nk else '[K, N]'}: {figures} us", flush=True)


if __name__ == "__main__":
    main()
