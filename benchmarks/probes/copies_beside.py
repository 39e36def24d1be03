"""What the copies of an exchange cost the product beside them, where neither waits for the other: cuBLAS and the copy engines of
two GPUs, driven by one process.

    python benchmarks/probes/copies_beside.py

For each shape of Ditron's Table 6, as one of two ranks has it: the product alone; in PARTS equal parts of its rows; the copies
alone; the product while all copies cross that belong to it (at once), and while a part of them crosses with each of its parts
(spread). Rounds take turns as in overlap_train/tools/measure/timing.py. Prints milliseconds, and the product alone over each: no
operator comes nearer to max(GEMM, exchange) whose product is not faster than cuBLAS's.
"""

from __future__ import annotations

import random
import statistics

import torch

SHAPES = [(tokens, features) for features in (8192, 4096, 2048) for tokens in (262144, 491520)]
PARTS, ROUNDS, RANKS = 6, 5, 2
PRODUCT, IN_PARTS, COPIES, AT_ONCE, SPREAD = "product", "in parts", "copies", "at once", "spread"
WHAT = (PRODUCT, IN_PARTS, COPIES, AT_ONCE, SPREAD)
BURST_FLOPS = 4e-3 * 650e12


class Gpu:
    """One rank: y [M/2, F] = a [M/2, F] @ b, and half of y's bytes for the peer."""

    def __init__(self, index: int, tokens: int, features: int) -> None:
        self.device = torch.device("cuda", index)
        with torch.cuda.device(index):
            like = dict(device=self.device, dtype=torch.bfloat16)
            self.a, self.b = torch.randn(tokens // RANKS, features, **like), torch.randn(features, features, **like)
            self.y = torch.empty_like(self.a)
            self.sent, self.received = (torch.randn(self.y.numel() // RANKS, **like) for _ in range(2))
            self.main, self.side = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
            self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.mark = torch.cuda.Event()

    def multiply(self, part: int, parts: int) -> None:
        with torch.cuda.stream(self.main):
            torch.mm(self.a.chunk(parts)[part], self.b.t(), out=self.y.chunk(parts)[part])

    def copy(self, peer: Gpu, part: int, parts: int) -> None:
        with torch.cuda.stream(self.side):
            peer.received.chunk(parts)[part].copy_(self.sent.chunk(parts)[part], non_blocking=True)


def burst(gpus: list[Gpu], what: str, count: int) -> float:
    """Milliseconds of one of `count` runs, on the slower GPU."""
    parts = PARTS if what in (IN_PARTS, SPREAD) else 1
    for gpu in gpus:
        torch.cuda.synchronize(gpu.device)
    for gpu in gpus:
        gpu.begin.record(gpu.main)
        gpu.side.wait_event(gpu.begin)
    for part in [*range(parts)] * count:
        for gpu, peer in zip(gpus, reversed(gpus), strict=True):
            if what in (AT_ONCE, SPREAD):  # a copy begins with its part of the product
                gpu.mark.record(gpu.main)
                gpu.side.wait_event(gpu.mark)
            if what not in (PRODUCT, IN_PARTS):
                gpu.copy(peer, part, parts)
            if what != COPIES:
                gpu.multiply(part, parts)
    for gpu in gpus:
        gpu.main.wait_stream(gpu.side)
        gpu.end.record(gpu.main)
    for gpu in gpus:
        torch.cuda.synchronize(gpu.device)
    return max(gpu.begin.elapsed_time(gpu.end) for gpu in gpus) / count


def main() -> None:
    for tokens, features in SHAPES:
        gpus = [Gpu(index, tokens, features) for index in range(RANKS)]
        count = min(16, max(3, round(BURST_FLOPS / (tokens * features * features))))
        found: dict[str, list[float]] = {what: [] for what in WHAT}
        for turn in range(ROUNDS):
            for what in random.Random(turn).sample(WHAT, len(WHAT)):
                burst(gpus, what, 1)
                found[what].append(burst(gpus, what, count))
        times = {what: statistics.median(times) for what, times in found.items()}
        shown = ", ".join(f"{what} {ms:.3f} ({times[PRODUCT] / ms:.3f})" for what, ms in times.items())
        print(f"{tokens} tokens, {features} features: {shown}", flush=True)
        del gpus
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
