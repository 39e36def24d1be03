"""Would more copy streams a GPU move pushes faster? One process, all GPUs, raw driver copies.

    python benchmarks/probes/copy_streams.py        (CUDA_DEVICE_MAX_CONNECTIONS=1 or 8)

Every GPU pushes its shard to every peer in chunks, a signal behind each, as the copy engine of an all-gather does, from one to
three streams that take the chunks in turn, alone and beside a GEMM. Prints microseconds, the slowest GPU's median of eight runs.
"""

from __future__ import annotations

import ctypes
import statistics

import torch

MIB = 1 << 20
LARGEST = 16 * MIB  # a shard of [8192 / 4, 4096] bf16
HEAD_START_CYCLES = 4_000_000  # 2 ms, in which the host gets ahead


class Gpu:
    """One device: its shard, where the peers' land, and its streams."""

    def __init__(self, index: int, count: int) -> None:
        self.device = torch.device("cuda", index)
        with torch.cuda.device(self.device):
            self.shard = torch.ones(LARGEST, dtype=torch.uint8, device=self.device)
            self.landing = torch.zeros(count, LARGEST, dtype=torch.uint8, device=self.device)
            self.signals = torch.zeros(count * 16, dtype=torch.int64, device=self.device)
            self.a = torch.randn(8192, 4096, device=self.device, dtype=torch.bfloat16)
            self.b = torch.randn(4096, 7168, device=self.device, dtype=torch.bfloat16)
            self.c = torch.empty(8192, 7168, device=self.device, dtype=torch.bfloat16)
            self.compute = torch.cuda.Stream()
            self.copies = [torch.cuda.Stream(priority=-1) for _ in range(3)]


def push_all(gpus: list[Gpu], streams: int, shard: int, chunks: int, beside_gemm: bool) -> float:
    """Microseconds from a GPU's start to its last signal, of the slowest GPU."""
    starts = [begin(gpu, streams, beside_gemm) for gpu in gpus]
    ends = [push(gpus, rank, streams, shard // chunks, chunks) for rank in range(len(gpus))]
    for gpu in gpus:
        torch.cuda.synchronize(gpu.device)
    return max(start.elapsed_time(end) for start, own in zip(starts, ends, strict=True) for end in own) * 1e3


def begin(gpu: Gpu, streams: int, beside_gemm: bool) -> torch.cuda.Event:
    with torch.cuda.device(gpu.device), torch.cuda.stream(gpu.compute):
        torch.cuda._sleep(HEAD_START_CYCLES)
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        for stream in gpu.copies[:streams]:
            stream.wait_event(start)
        if beside_gemm:
            torch.mm(gpu.a, gpu.b, out=gpu.c)
    return start


def push(gpus: list[Gpu], rank: int, streams: int, size: int, chunks: int) -> list[torch.cuda.Event]:
    """Enqueue the pushes of one GPU, nearest peer first; an event behind each stream."""
    gpu, ends = gpus[rank], []
    with torch.cuda.device(gpu.device):
        places = [((rank + step) % len(gpus), chunk) for step in range(1, len(gpus)) for chunk in range(chunks)]
        for number, (peer, chunk) in enumerate(places):
            stream = gpu.copies[number % streams].cuda_stream
            copy(gpus[peer].landing[rank].data_ptr() + chunk * size, gpu.shard.data_ptr() + chunk * size, size, stream)
            copy(gpus[peer].signals.data_ptr() + (16 * rank + chunk) * 8, gpu.signals.data_ptr(), 8, stream)
        for stream in gpu.copies[:streams]:
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record(stream)
    return ends


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    status = _copy(target, source, nbytes, stream)
    if status:
        raise RuntimeError(f"cuMemcpyDtoDAsync: error {status}")


_copy = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoDAsync_v2
_copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)


def main() -> None:
    count = torch.cuda.device_count()
    gpus = [Gpu(index, count) for index in range(count)]
    for gpu in gpus:  # opens the way to each peer
        for peer in gpus:
            peer.landing[gpu.device.index, :8].copy_(gpu.shard[:8])
    for shard in (LARGEST, LARGEST // 4):
        for chunks in (1, 2, 4):
            for beside_gemm in (False, True):
                runs = {n: [push_all(gpus, n, shard, chunks, beside_gemm) for _ in range(12)][4:] for n in (1, 2, 3)}
                times = ", ".join(f"{n} streams {statistics.median(times):.0f}" for n, times in runs.items())
                where = "beside a GEMM" if beside_gemm else "alone"
                print(f"{shard // MIB} MiB to each peer in {chunks} chunks, {where}: {times} us", flush=True)


if __name__ == "__main__":
    main()
