"""What one operator call does on the GPU: its kernels and copies on a time axis, from the profiler, as JSON and as a picture.

torchrun --standalone --nproc-per-node 4 -m overlap_train bench timeline --out runs/h200x4     (records, on GPUs)
overlap-train bench plot runs/h200x4                                                           (draws, anywhere)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...config import OverlapConfig
from ...linear import all_gather_linear, linear_reduce_scatter
from ...runtime.registry import shutdown
from ..measure.world import World
from .lanes import KINDS, NOTE, Span, between, draw_lanes, label_lanes, perfect
from .style import canvas, in_order, save

METHODS = ("collective", "chunked", "fused", "direct")
# Llama-3-8B MLP at s = 8192: M, features in, features out of the first and the second linear
M, HIDDEN, FFN = 8192, 4096, 14336

MARKER = "fillfunctor"  # the kernel between two calls


def record(out: Path, here: World) -> None:
    """Profile forward calls of both operators by each method; rank 0 writes its own view.

    Raises:
        ValueError: there are no GPUs.
    """
    if here.device.type != "cuda":
        raise ValueError(
            "bench timeline records GPUs, and this process sees none; to draw a recording: bench plot FOLDER"
        )
    device, world = here.device, here.size
    x = torch.randn(M // world, HIDDEN, device=device, dtype=torch.bfloat16)
    h = torch.randn(M, FFN // world, device=device, dtype=torch.bfloat16)
    w1 = torch.randn(FFN // world, HIDDEN, device=device, dtype=torch.bfloat16)
    w2 = torch.randn(HIDDEN, FFN // world, device=device, dtype=torch.bfloat16)
    calls: dict[str, list[Span]] = {}
    for method in METHODS:
        settings = {"group": here.group, "config": OverlapConfig(method=method)}
        calls[f"all_gather_linear {method}"] = _profile(partial(all_gather_linear, x, w1, **settings))
        calls[f"linear_reduce_scatter {method}"] = _profile(partial(linear_reduce_scatter, h, w2, **settings))
    if here.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        shape = {"m": M, "hidden": HIDDEN, "ffn": FFN, "world": world, "dtype": "bfloat16"}
        head = {"hardware": torch.cuda.get_device_name(device), "torch": torch.__version__, "shape": shape}
        (out / "timeline.json").write_text(json.dumps({**head, "calls": calls}, indent=1))
    shutdown()
    dist.destroy_process_group()


def _profile(call: Callable[[], Any]) -> list[Span]:
    """Device intervals of the third of three back-to-back calls after warm-up: name, stream, start and end in microseconds."""
    marker = torch.zeros(1, device="cuda")  # its kernels separate the calls on the compute stream
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()

    def three_calls() -> None:
        for number in range(3):
            marker.fill_(number)
            call()
        marker.fill_(0)

    return device_spans(three_calls, head_start_cycles=4_000_000)


def device_spans(work: Callable[[], object], head_start_cycles: int) -> list[Span]:
    """Everything on the device during `work`: name, stream, start and end in microseconds, in the order of starts.

    The device starts later than the host by so many cycles (2,000,000 are about a millisecond), so that launches do not show.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.cuda._sleep(head_start_cycles)
        work()
        torch.cuda.synchronize()
    events = [e for e in profiler.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]
    spans = [
        {"name": e.name(), "stream": e.device_resource_id(), "start": e.start_ns() / 1e3, "end": e.end_ns() / 1e3}
        for e in events
    ]
    return sorted(spans, key=lambda span: span["start"])


def last_call(spans: Sequence[Span]) -> list[Span]:
    """The work between the last two markers, starting at 0. Markers run on the compute stream, which every call joins."""
    *_, first, last = sorted((span for span in spans if MARKER in span["name"].lower()), key=lambda span: span["end"])
    return between(spans, first["end"], last["end"], first["stream"], MARKER)


def draw(recording: dict[str, Any], path: Path) -> Path:
    """The last recorded call of each method: forward of a column linear on the left, of a row linear on the right."""
    calls = {tuple(title.split()): last_call(spans) for title, spans in recording["calls"].items()}
    methods, operators = in_order({method for _, method in calls}), list(dict.fromkeys(name for name, _ in calls))
    shape = recording["shape"]
    header = (
        f"One forward call by each method, {shape['world']} x {recording['hardware']}",
        f"Shorter is better. M = {shape['m']}, hidden {shape['hidden']}, FFN {shape['ffn']}, bf16.",
        NOTE,
    )
    figure, grid = canvas(len(methods) * len(operators), len(operators), 1.05, header, (*KINDS, "bound"), sharex=True)
    for line, method in zip(grid, methods, strict=True):
        for axes, operator in zip(line, operators, strict=True):
            if (operator, method) not in calls:
                axes.set_axis_off()
                continue
            draw_lanes(axes, f"{operator} by {method}:", calls[operator, method], method == "direct")
            if one_after_the_other := calls.get((operator, "collective")):
                axes.axvline(perfect(one_after_the_other), color="black", linewidth=2)
    label_lanes(grid)
    return save(figure, path)
