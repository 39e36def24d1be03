"""Would the Hopper kernel be faster with other tiles? AG + GEMM for one rank (nothing to wait for) against cuBLAS.

    python benchmarks/probes/gemm_shapes.py

Sustained: each candidate runs for 120 ms at a time, so that the power limit counts. Prints microseconds by GROUP_M (rows of tiles
that share columns) and BLOCK_N.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from overlap_train.kernels.hopper_all_gather_gemm import hopper_all_gather_gemm_kernel as kernel
from overlap_train.operators import hopper
from overlap_train.operators.tiles import multiprocessors

# M, N, K, and whether b lies as [N, K], as in forward
SHAPES = ((8192, 7168, 4096, True), (8192, 3584, 4096, False), (8192, 1536, 4096, True), (8192, 14336, 8192, True))
TILES = ((4, 256), (8, 256), (16, 256), (32, 256), (8, 128), (16, 128))  # GROUP_M, BLOCK_N
STAGES = {256: 4, 128: 6}  # that fit beside the buffer of half a tile
SUSTAINED_MS = 120.0


def ours(a: torch.Tensor, b_kn: torch.Tensor, y: torch.Tensor, words: torch.Tensor, group_m: int, block_n: int) -> None:
    """y [M, N] = a [M, K] @ b_kn [K, N]. words: int64 [>= 8], for the tile counter and what a single rank never reads."""
    (m, k), n, block_k = a.shape, y.shape[1], hopper.BLOCK_K
    words.zero_()
    is_nk = b_kn.stride(0) == 1
    rows, describe = hopper.BLOCK_M, hopper._descriptor
    b = describe(b_kn.t(), block_n, block_k) if is_nk else describe(b_kn, block_k, block_n)
    panel = describe(a, rows, block_k)
    kernel[(multiprocessors(a.device),)](
        panel, panel, b, describe(y, rows, block_n // 2), y, m, n, k,
        rank=0, counter_ptr=words[:1], signals_ptr=words[1:], epoch_ptr=words[2:], abort_ptr=words[4:], record_ptr=words[6:],
        tag=0, limit=1 << 40, WORLD=1, CHUNKS=1, BLOCK_M=rows, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=group_m,
        STAGES=STAGES[block_n], B_IS_NK=is_nk, WHOLE_TILES=True, **hopper._LAUNCH,
    )  # fmt: skip


def sustained_us(call: Callable[[], object]) -> float:
    call()
    count = max(20, int(SUSTAINED_MS * 1e3 / burst_us(call, 20)))
    return burst_us(call, count)


def burst_us(call: Callable[[], object], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count * 1e3


def main() -> None:
    words = torch.zeros(16, dtype=torch.int64, device="cuda")
    for m, n, k, is_nk in SHAPES:
        a, y = (torch.randn(m, width, device="cuda", dtype=torch.bfloat16) for width in (k, n))
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        b_kn = b.t() if is_nk else b.t().contiguous()
        cublas = sustained_us(lambda a=a, b_kn=b_kn, y=y: torch.mm(a, b_kn, out=y))
        print(f"{m} x {n} x {k}: cuBLAS {cublas:.0f} us", end="")
        for group_m, block_n in TILES:
            ours(a, b_kn, y.fill_(7), words, group_m, block_n)
            torch.testing.assert_close(y[:256], a[:256] @ b_kn, rtol=2e-2, atol=1.0)
            us = sustained_us(lambda args=(a, b_kn, y, words, group_m, block_n): ours(*args))
            print(f", {group_m} x {block_n}: {us:.0f}", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
