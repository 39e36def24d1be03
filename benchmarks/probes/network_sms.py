"""What the SMs that NCCL takes between nodes cost a product, and gain the network. Two GPUs of one machine as two nodes.

    torchrun --standalone --nproc-per-node 2 benchmarks/probes/network_sms.py

For each number of SMs:

    product     on the SMs that are left, nothing else running: what sparing them costs
    network     an exchange of 32 MiB in each direction by NCCL with at most so many CTAs, nothing else running

Microseconds, medians.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from overlap_train.gpu.blas import Blas
from overlap_train.tools.bench.hierarchical import pretend_nodes

M, N, K = 8192, 36864, 4096  # a product of 3 ms on an H200, as long as half an exchange
EXCHANGED = 32 << 20
COUNTS = (2, 4, 8, 16, 32)
ROUNDS, CALLS = 7, 6


def communicator(ctas: int) -> dist.ProcessGroup:
    """Of both ranks, as symmetric/nccl.py makes one."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = ctas
    return dist.new_group([0, 1], backend="nccl", pg_options=options)


class Exchange:
    """Sends and receives in a stream of its own."""

    def __init__(self, ctas: int, device: torch.device) -> None:
        self._group, self.stream = communicator(ctas), torch.cuda.Stream(device)
        self._sent, self._received = (torch.ones(EXCHANGED, dtype=torch.uint8, device=device) for _ in range(2))

    def __call__(self) -> None:
        peer = 1 - dist.get_rank()
        with torch.cuda.stream(self.stream):
            operations = [
                dist.P2POp(dist.isend, self._sent, peer, self._group),
                dist.P2POp(dist.irecv, self._received, peer, self._group),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()


def microseconds(call: Callable[[], object], stream: torch.cuda.Stream) -> float:
    """Of one call, of a burst in `stream`."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    for _ in range(CALLS):
        call()
    end.record(stream)
    end.synchronize()
    return 1000 * begin.elapsed_time(end) / CALLS


class Bench:
    """Products and exchanges on one GPU; all ranks measure alike."""

    def __init__(self, device: torch.device) -> None:
        self._blas = Blas(device)
        a, b = torch.randn(M, K, device=device), torch.randn(K, N, device=device)
        self._a, self._b = a.bfloat16(), b.bfloat16()
        self._y = self._a.new_empty(M, N)
        self._stream = torch.cuda.current_stream(device)

    def product(self, spared: int) -> Callable[[], object]:
        def multiply() -> None:
            with self._blas.sparing(spared):
                torch.mm(self._a, self._b, out=self._y)

        return multiply

    def time(self, call: Callable[[], object], stream: torch.cuda.Stream | None = None) -> float:
        dist.barrier()
        torch.cuda.synchronize()
        return microseconds(call, stream or self._stream)


def main() -> None:
    pretend_nodes(1)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=60), device_id=device)
    exchanges = {count: Exchange(count, device) for count in COUNTS}
    bench = Bench(device)
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in (0, *COUNTS)}
    for _ in range(1 + ROUNDS):
        for count, times in found.items():
            exchange = exchanges.get(count)
            network = 0.0 if exchange is None else bench.time(exchange, exchange.stream)
            times.append((bench.time(bench.product(count)), network))
    if dist.get_rank() == 0:
        print(f"{'SMs':>4} {'product':>8} {'network':>8}")
        for count, times in found.items():
            product, network = (median(column) for column in zip(*times[1:], strict=True))
            print(f"{count:>4} {product:8.0f} {network:8.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
