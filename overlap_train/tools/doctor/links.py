"""Bandwidth of the copy engine over every link, speed of every GPU, and the rank that is slower than the others.

One pair of ranks copies at a time. Figures are judged by what the hardware should reach (select/system.py) and by the other
ranks' figures; on CPUs they are reported only.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

import torch
import torch.distributed as dist

from ...select.system import System, system_of
from ...symmetric import open_heap
from ...symmetric.agreement import Agreement
from ..measure import timing, world
from ..measure.timing import Call, Pace, Timing
from ..measure.world import World
from .memory import AGREE_S
from .report import Finding, fail, ok, warn

Measure = Callable[[Mapping[str, Call], Pace, dist.ProcessGroup, torch.device], dict[str, Timing]]
Speeds = dict[tuple[int, int], float]  # GB/s by (source, target)
Who = Callable[[int], str]

WARN_BELOW = 0.8  # of what the hardware should reach: clocks move figures by 10 %
FAIL_BELOW = 0.6
ODD_BELOW = 0.8  # of the median over ranks or links: one is slower than the others
_PACE = Pace(3, 5)
_LINK_FIX = (
    "nvidia-smi nvlink -s and -e on the host, nvidia-smi topo -m; other jobs on these GPUs; then have the host drained"
)
_SLOW_FIX = (
    "nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE on the host: throttling, a cap, other processes; else drain it"
)


def check_links(here: World, provider: str, call_s: float) -> list[Finding]:
    """Measure and judge. Collective; each rank reports its own links and its own speed. call_s: see Agreement."""
    on_gpu = here.device.type == "cuda"
    world.heat(here.device)
    tflops = gemm_speeds(here, 8192 if on_gpu else 256, timing.measure)
    agreement = Agreement(here.group, AGREE_S, call_s)
    heap = open_heap(agreement, (128 << 20) if on_gpu else (4 << 20), provider, here.device)
    speeds = link_speeds(here, [heap.view(rank) for rank in range(here.size)], timing.measure)
    heap.close()
    if not on_gpu:
        return report_only(here.rank, speeds, tflops)
    model = system_of(torch.cuda.get_device_name(here.device))
    judged = [*judge_links(here.rank, here.who, speeds, model), judge_speed(tflops[here.rank], model)]
    return judged + slow_ranks(here, speeds, tflops)


def check_alone(here: World, count: int) -> list[Finding]:
    """A single process with `count` GPUs: its own GPU's speed, and copies between all pairs, judged like the links of ranks."""
    world.heat(here.device)
    model = system_of(torch.cuda.get_device_name(here.device))
    found = [judge_speed(gemm_speeds(here, 8192, timing.measure)[0], model)]
    speeds = _copies_between_gpus(here, count)
    for index in range(count):
        found += judge_links(index, "GPU {}".format, speeds, model)
    return found


def link_speeds(here: World, views: Sequence[torch.Tensor], measure: Measure) -> Speeds:
    """GB/s of every rank pushing a whole heap to every other, one pair at a time: while it copies, the others do nothing."""
    source = torch.ones_like(views[here.rank])
    speeds: Speeds = {}
    for first, second in permutations(range(here.size), 2):
        copy = _copy(views[second], source) if here.rank == first else _nothing
        (took,) = measure({"copy": copy}, _PACE, here.group, here.device).values()
        speeds[first, second] = source.nbytes / took.ms / 1e6
    return speeds


def gemm_speeds(here: World, size: int, measure: Measure) -> dict[int, float]:
    """TFLOP/s of every rank at a square product, all ranks at once. A rank does nothing in the others' turns."""
    dtype = torch.bfloat16 if here.device.type == "cuda" else torch.float32
    a = torch.randn(size, size, dtype=dtype, device=here.device)
    product = torch.empty_like(a)

    def multiply(index: int) -> object:
        return torch.mm(a, a, out=product)

    calls: dict[str, Call] = {str(r): multiply if r == here.rank else _nothing for r in range(here.size)}
    times = measure(calls, _PACE, here.group, here.device)
    return {int(rank): 2 * size**3 / took.ms / 1e9 for rank, took in times.items()}


def judge_links(source: int, who: Who, speeds: Speeds, model: System | None) -> list[Finding]:
    """One finding for each link of the source that is slow, else one for all of them."""
    mine = {target: speed for (start, target), speed in speeds.items() if start == source}
    if not mine:
        return []
    usual, found = statistics.median(speeds.values()), []
    should = model.copy_gbs if model and model.is_measured else None
    expected = f"at least {WARN_BELOW * should:.0f} GB/s" if should else "not judged: unknown GPU"
    for target, speed in mine.items():
        measured = f"{speed:.0f} GB/s from {who(source)} to {who(target)}"
        if should and speed < WARN_BELOW * should:
            found.append((fail if speed < FAIL_BELOW * should else warn)("link", measured, expected, _LINK_FIX))
        elif speed < ODD_BELOW * usual:
            found.append(warn("link", measured, f"about {usual:.0f} GB/s, as the median link has", _LINK_FIX))
    told = f"{min(mine.values()):.0f} to {max(mine.values()):.0f} GB/s to {len(mine)} peers"
    first, *others = found or [ok("link", told, expected)]
    return [replace(first, figure=min(mine.values())), *others]  # one figure of each source


def judge_speed(tflops: float, model: System | None) -> Finding:
    """The finding about one GPU's speed, against what its model should reach."""
    measured, should = (
        f"{tflops:.0f} TFLOP/s (8192 x 8192 x 8192, bf16)",
        model.sustained_tflops if model and model.is_measured else None,
    )
    expected = f"at least {WARN_BELOW * should:.0f} TFLOP/s" if should else "not judged: unknown GPU"
    is_slow = should is not None and tflops < WARN_BELOW * should
    found = warn("gemm", measured, expected, _SLOW_FIX) if is_slow else ok("gemm", measured, expected)
    return replace(found, figure=tflops)


def slow_ranks(here: World, speeds: Speeds, tflops: dict[int, float]) -> list[Finding]:
    """A finding on the rank that is slower than the others at products, or on all its links; rank 0 says so if none is."""
    slow = {rank: reason for rank in range(here.size) if (reason := _why_slow(rank, speeds, tflops))}
    if here.rank in slow:
        expected = f"within {1 - ODD_BELOW:.0%} of the median rank: all ranks wait for the slowest"
        return [warn("slow rank", f"{here.who(here.rank)}: {slow[here.rank]}", expected, _SLOW_FIX)]
    if slow or here.rank != 0 or here.size == 1:
        return []
    return [ok("slow rank", f"none: products {min(tflops.values()):.0f} to {max(tflops.values()):.0f} TFLOP/s")]


def report_only(rank: int, speeds: Speeds, tflops: dict[int, float]) -> list[Finding]:
    """The findings on CPUs: figures without a judgement."""
    copies = [speed for (source, _), speed in speeds.items() if source == rank]
    found = [ok("link", f"{min(copies):.1f} GB/s through shared memory", "not judged: CPU")] if copies else []
    return [*found, ok("gemm", f"{tflops[rank]:.3f} TFLOP/s (fp32)", "not judged: CPU")]


def _copies_between_gpus(here: World, count: int) -> Speeds:
    buffers = [torch.ones(128 << 20, dtype=torch.uint8, device=f"cuda:{index}") for index in range(count)]
    speeds: Speeds = {}
    for first, second in permutations(range(count), 2):
        torch.cuda.set_device(first)  # events are recorded on its stream
        calls = {"copy": _copy(buffers[second], buffers[first])}
        (took,) = timing.measure(calls, _PACE, here.group, here.device).values()
        speeds[first, second] = buffers[first].nbytes / took.ms / 1e6
    torch.cuda.set_device(here.device)
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
