"""Do pushes go faster if two ranks never push to one peer at the same time? One process, all GPUs, raw driver copies.

    python benchmarks/probes/turns.py        (CUDA_DEVICE_MAX_CONNECTIONS=1 or 8)

Every GPU pushes a block to every peer, nearest following first, a signal behind each, once or twice over; the GPUs start up to
`skew` microseconds apart. Freely, or in turns: when GPU r + 1 has pushed to a peer it sends a token to GPU r, which would push to
the same peer next and waits for that. Prints microseconds from the latest start to the last signal, means over random starts.
"""

from __future__ import annotations

import ctypes
import random
import statistics

import torch

MIB = 1 << 20
BLOCK = 16 * MIB  # a shard of [8192 / 4, 4096] bf16
CYCLES_PER_US = 1980  # of torch.cuda._sleep at the H200's boost clock

_library = ctypes.CDLL("libcuda.so.1")
_copy, _wait_value = _library.cuMemcpyDtoDAsync_v2, _library.cuStreamWaitValue64_v2
_copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
_wait_value.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)


class Gpu:
    """One device: its block, where the peers' land, its signals and its token."""

    def __init__(self, index: int, count: int) -> None:
        self.device = torch.device("cuda", index)
        with torch.cuda.device(self.device):
            self.block = torch.ones(BLOCK, dtype=torch.uint8, device=self.device)
            self.landing = torch.zeros(count, BLOCK, dtype=torch.uint8, device=self.device)
            self.signals = torch.zeros(count, dtype=torch.int64, device=self.device)
            self.token = torch.zeros(1, dtype=torch.int64, device=self.device)
            self.steps = torch.arange(64, dtype=torch.int64, device=self.device)
            self.stream = torch.cuda.Stream(priority=-1)
            self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))


def run(gpus: list[Gpu], delays_us: list[float], size: int, rounds: int, in_turns: bool, gate: torch.Tensor) -> float:
    """Microseconds from the latest start to the last signal."""
    gate.zero_()
    for gpu, delay in zip(gpus, delays_us, strict=True):
        gpu.token.zero_()
        with torch.cuda.device(gpu.device), torch.cuda.stream(gpu.stream):
            check(_wait_value(gpu.stream.cuda_stream, gate.data_ptr(), 1, 0))
            gpu.start.record()
            torch.cuda._sleep(int(delay * CYCLES_PER_US))
    for gpu in gpus:
        torch.cuda.current_stream(gpu.device).synchronize()  # tokens are zero everywhere
    for rank, gpu in enumerate(gpus):
        with torch.cuda.device(gpu.device):
            enqueue(gpus, rank, size, rounds, in_turns)
            gpu.end.record(gpu.stream)
    gate.fill_(1)
    for gpu in gpus:
        torch.cuda.synchronize(gpu.device)
    return max(gpu.start.elapsed_time(gpu.end) for gpu in gpus) * 1e3 - max(delays_us)


def enqueue(gpus: list[Gpu], rank: int, size: int, rounds: int, in_turns: bool) -> None:
    """All pushes of one GPU."""
    gpu, count = gpus[rank], len(gpus)
    stream, before = gpu.stream.cuda_stream, gpus[rank - 1]
    for number in range(rounds * (count - 1)):
        peer = gpus[(rank + 1 + number % (count - 1)) % count]
        if in_turns and number:
            check(_wait_value(stream, gpu.token.data_ptr(), number, 0))
        check(_copy(peer.landing.data_ptr() + rank * BLOCK, gpu.block.data_ptr(), size, stream))
        check(_copy(peer.signals.data_ptr() + rank * 8, gpu.steps.data_ptr(), 8, stream))
        if in_turns:
            check(_copy(before.token.data_ptr(), gpu.steps.data_ptr() + (number + 1) * 8, 8, stream))


def check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver refused: error {status}")


def main() -> None:
    count = torch.cuda.device_count()
    gpus = [Gpu(index, count) for index in range(count)]
    gate = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    for gpu in gpus:  # opens the way to each peer; loads the sleeping kernel, which cannot be done behind a wait
        torch.cuda.set_device(gpu.device)
        torch.cuda._sleep(1)
        for peer in gpus:
            peer.landing[gpu.device.index, :8].copy_(gpu.block[:8])
        torch.cuda.synchronize()
    for size in (BLOCK, BLOCK // 2):
        for rounds in (1, 2):
            for skew in (0, 20, 40, 80, 150):
                times: dict[bool, list[float]] = {False: [], True: []}
                for seed in range(24):
                    delays = [random.Random(4 * seed + gpu).uniform(0, skew) for gpu in range(count)]
                    for in_turns in (False, True):
                        times[in_turns].append(run(gpus, delays, size, rounds, in_turns, gate))
                freely, turns = (f"{statistics.mean(t):.0f} (worst {max(t):.0f})" for t in times.values())
                print(
                    f"{rounds} x {count - 1} blocks of {size // MIB} MiB, skew {skew:3d} us: freely {freely}, in turns {turns}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
