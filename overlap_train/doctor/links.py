"""Bandwidth of the copy engine over every link, speed of every GPU, and the rank that is slower than the others.

One pair of ranks copies at a time. Figures are judged by the model of the hardware (hardware.py) and by the other ranks' figures;
on CPUs they are reported only.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

import torch
import torch.distributed as dist

from ..bench import timing, world
from ..bench.timing import Call, Pace, Timing
from ..symmetric import open_heap
from .hardware import FAIL_BELOW, ODD_BELOW, WARN_BELOW, Hardware, model_of
from .place import Place
from .report import Finding

Measure = Callable[[Mapping[str, Call], Pace, dist.ProcessGroup, torch.device], dict[str, Timing]]
Speeds = dict[tuple[int, int], float]  # GB/s by (source, target)

_PACE = Pace(3, 5)
_LINK_FIX = (
    "nvidia-smi nvlink -s and -e on {host}, nvidia-smi topo -m; other jobs on these GPUs; then have the host drained"
)
_SLOW_FIX = (
    "nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE on {host}: throttling, a cap, other processes; else drain the host"
)


def check_links(place: Place, provider: str) -> list[Finding]:
    """Measure and judge. Collective; each rank reports its own links and its own speed."""
    on_gpu = place.device.type == "cuda"
    world.heat(place.device, 0.5)
    tflops = gemm_speeds(place, 8192 if on_gpu else 256, timing.measure)
    heap = open_heap(place.joined, (128 << 20) if on_gpu else (4 << 20), provider, place.device)
    speeds = link_speeds(place, [heap.view(rank) for rank in range(place.size)], timing.measure)
    heap.close()
    model = model_of(torch.cuda.get_device_name(place.device)) if on_gpu else None
    if not on_gpu:
        return report_only(place, speeds, tflops)
    return judge_links(place, speeds, model) + judge_speed(place, tflops, model) + slow_ranks(place, speeds, tflops)


def link_speeds(place: Place, views: Sequence[torch.Tensor], measure: Measure) -> Speeds:
    """GB/s of every rank pushing a whole heap to every other, one pair at a time: while it copies, the others do nothing."""
    source = torch.ones_like(views[place.rank])
    speeds: Speeds = {}
    for first, second in permutations(range(place.size), 2):
        copy = _copy(views[second], source) if place.rank == first else _nothing
        (took,) = measure({"copy": copy}, _PACE, place.joined, place.device).values()
        speeds[first, second] = source.nbytes / took.ms / 1e6
    return speeds


def gemm_speeds(place: Place, size: int, measure: Measure) -> dict[int, float]:
    """TFLOP/s of every rank at a square product, all ranks at once. A rank does nothing in the others' turns."""
    dtype = torch.bfloat16 if place.device.type == "cuda" else torch.float32
    a = torch.randn(size, size, dtype=dtype, device=place.device)
    product = torch.empty_like(a)

    def multiply(index: int) -> object:
        return torch.mm(a, a, out=product)

    calls: dict[str, Call] = {str(r): multiply if r == place.rank else _nothing for r in range(place.size)}
    times = measure(calls, _PACE, place.joined, place.device)
    return {int(rank): 2 * size**3 / took.ms / 1e9 for rank, took in times.items()}


def judge_links(place: Place, speeds: Speeds, model: Hardware | None) -> list[Finding]:
    """One finding for each link of this rank that is slow, else one for all of them."""
    mine = {target: speed for (source, target), speed in speeds.items() if source == place.rank}
    if not mine:
        return []
    usual, found = statistics.median(speeds.values()), []
    for target, speed in mine.items():
        fix = _LINK_FIX.format(host=" and ".join(dict.fromkeys((place.hosts[place.rank], place.hosts[target]))))
        measured = f"{speed:.0f} GB/s to {place.who(target)}"
        if model is not None and speed < WARN_BELOW * model.push_gbs:
            complain = place.fail if speed < FAIL_BELOW * model.push_gbs else place.warn
            found.append(complain("link", measured, f"at least {WARN_BELOW * model.push_gbs:.0f} GB/s", fix))
        elif speed < ODD_BELOW * usual:
            found.append(place.warn("link", measured, f"about {usual:.0f} GB/s, as the median link has", fix))
    expected = f"at least {WARN_BELOW * model.push_gbs:.0f} GB/s" if model else "not judged: unknown GPU"
    told = f"{min(mine.values()):.0f} to {max(mine.values()):.0f} GB/s to {len(mine)} peers"
    return found or [place.ok("link", told, expected)]


def judge_speed(place: Place, tflops: dict[int, float], model: Hardware | None) -> list[Finding]:
    """Of this rank's GPU against the model."""
    speed = tflops[place.rank]
    measured = f"{speed:.0f} TFLOP/s (8192 x 8192 x 8192, bf16)"
    if model is None:
        return [place.ok("gemm", measured, "not judged: unknown GPU")]
    expected = f"at least {WARN_BELOW * model.gemm_tflops:.0f} TFLOP/s"
    if speed < WARN_BELOW * model.gemm_tflops:
        return [place.warn("gemm", measured, expected, _SLOW_FIX.format(host=place.hosts[place.rank]))]
    return [place.ok("gemm", measured, expected)]


def slow_ranks(place: Place, speeds: Speeds, tflops: dict[int, float]) -> list[Finding]:
    """A finding on the rank that is slower than the others at products, or on all its links; rank 0 says so if none is."""
    reasons = {rank: _why_slow(rank, speeds, tflops) for rank in range(place.size)}
    slow = {rank: reason for rank, reason in reasons.items() if reason}
    if place.rank in slow:
        fix = _SLOW_FIX.format(host=place.hosts[place.rank])
        expected = f"within {1 - ODD_BELOW:.0%} of the median rank: all ranks wait for the slowest"
        return [place.warn("slow rank", f"{place.who(place.rank)}: {slow[place.rank]}", expected, fix)]
    if slow or place.rank != 0 or place.size == 1:
        return []
    return [place.ok("slow rank", f"none: products {min(tflops.values()):.0f} to {max(tflops.values()):.0f} TFLOP/s")]


def report_only(place: Place, speeds: Speeds, tflops: dict[int, float]) -> list[Finding]:
    """On CPUs: figures without a judgement."""
    copies = [speed for (source, _), speed in speeds.items() if source == place.rank]
    found = [place.ok("link", f"{min(copies):.1f} GB/s through shared memory", "not judged: CPU")] if copies else []
    return [*found, place.ok("gemm", f"{tflops[place.rank]:.3f} TFLOP/s (fp32)", "not judged: CPU")]


def check_alone(place: Place, count: int) -> list[Finding]:
    """A single process with `count` GPUs: its own GPU's speed, and copies between all pairs, judged like the links of ranks."""
    world.heat(place.device, 0.5)
    model = model_of(torch.cuda.get_device_name(place.device))
    found = judge_speed(place, gemm_speeds(place, 8192, timing.measure), model)
    speeds = _copies_between_gpus(place, count)
    everyone = replace(place, size=count, hosts=place.hosts * count, ranks=tuple(range(count)), unit="GPU")
    for index in range(count):
        found += judge_links(replace(everyone, rank=index), speeds, model)
    return found


def _copies_between_gpus(place: Place, count: int) -> Speeds:
    buffers = [torch.ones(128 << 20, dtype=torch.uint8, device=f"cuda:{index}") for index in range(count)]
    speeds: Speeds = {}
    for first, second in permutations(range(count), 2):
        torch.cuda.set_device(first)  # events are recorded on its stream
        calls = {"copy": _copy(buffers[second], buffers[first])}
        (took,) = timing.measure(calls, _PACE, place.joined, place.device).values()
        speeds[first, second] = buffers[first].nbytes / took.ms / 1e6
    torch.cuda.set_device(place.device)
    return speeds


def _why_slow(rank: int, speeds: Speeds, tflops: dict[int, float]) -> str:
    usual = statistics.median(tflops.values())
    if tflops[rank] < ODD_BELOW * usual:
        return f"products at {tflops[rank]:.0f} TFLOP/s, the median is {usual:.0f}"
    for end, way in ((0, "out of"), (1, "into")):
        mine = [speed for pair, speed in speeds.items() if pair[end] == rank]
        others = [speed for pair, speed in speeds.items() if pair[end] != rank]
        if len(mine) > 1 and max(mine) < ODD_BELOW * statistics.median(others):
            return f"every link {way} it is slow: {max(mine):.0f} GB/s at most, the median is {statistics.median(others):.0f}"
    return ""


def _copy(target: torch.Tensor, source: torch.Tensor) -> Call:
    return lambda index: target.copy_(source, non_blocking=True)


def _nothing(index: int) -> object:
    return None
