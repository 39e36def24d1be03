"""Host time of one exchange between two nodes: through torch's process group, and by NCCL's own functions on its communicator.

torchrun --standalone --nproc-per-node 2 benchmarks/probes/exchange_host_time.py

The two GPUs play two nodes. An exchange sends 4 MiB and a word, and receives as much, in one group (symmetric/nccl.py).
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from overlap_train.tools.measure.pretended import pretend_nodes

NBYTES, ROUNDS, IN_A_ROW = 4 << 20, 30, 4
BYTE = 1  # ncclUint8
Exchange = Callable[[], Callable[[], None]]  # starts one; returns what waits until it has arrived


class Twin:
    """This rank's communicator with its twin, and what travels."""

    def __init__(self, rank: int, device: torch.device) -> None:
        store = dist.PrefixStore("exchange", dist.distributed_c10d._world.pg_map[dist.group.WORLD][1])
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.max_ctas, options.config.cga_cluster_size = 4, 1
        self.group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
        self.group.eager_connect_single_device(device)
        self.peer, self.stream = 1 - rank, torch.cuda.Stream(device, priority=-1)
        self.ready, self.here = torch.cuda.Event(), torch.cuda.Event()
        sizes = (NBYTES, 8)
        self.sent = [torch.full((size,), rank + 1, dtype=torch.uint8, device=device) for size in sizes]
        self.received = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
        self.nccl = ctypes.CDLL("libnccl.so.2")
        call = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        self.nccl.ncclSend.argtypes = self.nccl.ncclRecv.argtypes = call

    def by_torch(self) -> Callable[[], None]:
        self.group._start_coalescing()
        for out, into in zip(self.sent, self.received, strict=True):
            self.group.send([out], self.peer, 0)
            self.group.recv([into], self.peer, 0)
        return self.group._end_coalescing().wait

    def by_nccl(self) -> Callable[[], None]:
        self.ready.record()
        self.stream.wait_event(self.ready)
        to = (BYTE, self.peer, self.group._comm_ptr(), self.stream.cuda_stream)
        failed = self.nccl.ncclGroupStart()
        for out, into in zip(self.sent, self.received, strict=True):
            failed |= self.nccl.ncclSend(out.data_ptr(), out.numel(), *to)
            failed |= self.nccl.ncclRecv(into.data_ptr(), into.numel(), *to)
        assert not failed | self.nccl.ncclGroupEnd()
        self.here.record(self.stream)
        return lambda: torch.cuda.current_stream().wait_event(self.here)


def host_us(exchange: Exchange) -> tuple[float, float]:
    """Median microseconds of starting an exchange, and of waiting for it."""
    starts, waits = [], []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        for _ in range(IN_A_ROW):
            begin = time.perf_counter()
            arrive = exchange()
            started = time.perf_counter()
            arrive()
            starts.append(started - begin)
            waits.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(starts), 1e6 * statistics.median(waits)


def main() -> None:
    pretend_nodes(1)
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    twin = Twin(rank, device)
    for name, exchange in (("torch", twin.by_torch), ("NCCL", twin.by_nccl)) * 2:
        start, wait = host_us(exchange)
        assert all(int(part[0]) == 2 - rank for part in twin.received)
        if rank == 0:
            print(f"{name}: {start:.1f} us to start an exchange, {wait:.1f} us to wait for it", flush=True)
    os._exit(0)  # a communicator of its own would hold up destroy_process_group


if __name__ == "__main__":
    main()
