"""What one call does on the GPU: its kernels and copies on a time axis, from the profiler, as JSON and as a picture.

    linears   both operators of a Llama-3-8B MLP, forward
    ulysses   a Ulysses attention block of Llama-3 8B, forward: projections, exchanges, rotation, attention
    nodes     both operators of a wide MLP, forward, with one rank or several in each node: NCCL over sockets in between

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
from ...group.registry import shutdown
from ...linear import all_gather_linear, linear_reduce_scatter
from ..measure.models import MODELS
from ..measure.world import World
from ..pictures.lanes import (
    KINDS,
    LANES,
    NOTE,
    WAITS,
    Span,
    between,
    draw_lanes,
    label_lanes,
    perfect,
    stages_of,
    stored_inside,
    unit_of,
)
from ..pictures.style import canvas, in_order, save
from .attention import Data, overlapped

METHODS = ("collective", "chunked", "fused", "direct")
# M, features in, features out of the first and the second linear of the MLP; the block has as many tokens in all
MODEL, M, HIDDEN, FFN = "llama3-8b", 8192, 4096, 14336
# Features between the two, for each rank, where sockets carry what is sent: a GPU multiplies for 13 ms. Loopback takes 14 ms at
# 40 Gbit/s for the 32 MiB that each of two sends (bench hierarchical).
WIDE = 163840

MARKER = "fillfunctor"  # the kernel between two calls
OWN_MARKER = f"{MARKER}<short>"  # of 16-bit integers, with which no model fills anything
Calls = dict[str, Callable[[], Any]]  # by "operator method"


def record(out: Path, what: str, node_ranks: int, here: World) -> None:
    """Profile forward calls of `what` by each method; rank 0 writes its own view. node_ranks: ranks of each node, of `nodes`.

    Raises:
        ValueError: there are no GPUs.
    """
    if here.device.type != "cuda":
        raise ValueError(
            "bench timeline records GPUs, and this process sees none; to draw a recording: bench plot FOLDER"
        )
    calls, shape = _nodes(here, node_ranks) if what == NODES else _IN_A_NODE[what](here)
    with torch.no_grad():
        spans = {name: _profile(call) for name, call in calls.items()}
    if here.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        head = {"hardware": torch.cuda.get_device_name(here.device), "torch": torch.__version__}
        shape |= {"world": here.size, "dtype": "bfloat16"}
        (out / "timeline.json").write_text(json.dumps({**head, "shape": shape, "calls": spans}, indent=1))
    shutdown()
    dist.destroy_process_group()


def _linears(here: World) -> tuple[Calls, dict[str, Any]]:
    """The calls, and their sizes."""
    return _mlp(here, FFN, {method: OverlapConfig(method=method) for method in METHODS})


def _nodes(here: World, node_ranks: int) -> tuple[Calls, dict[str, Any]]:
    """The calls, and their sizes. `direct` does not cross nodes."""
    configs = {method: OverlapConfig(method=method, node_ranks=node_ranks) for method in METHODS if method != "direct"}
    calls, sizes = _mlp(here, WIDE * here.size, configs)
    return calls, sizes | {"nodes": here.size // node_ranks}


def _mlp(here: World, ffn: int, configs: dict[str, OverlapConfig]) -> tuple[Calls, dict[str, Any]]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=here.device, dtype=torch.bfloat16)

    x, h = normal(M // here.size, HIDDEN), normal(M, ffn // here.size)
    w1, w2 = normal(ffn // here.size, HIDDEN), normal(HIDDEN, ffn // here.size)
    calls: Calls = {}
    for method, config in configs.items():
        settings: Any = {"group": here.group, "config": config}
        calls[f"all_gather_linear {method}"] = partial(all_gather_linear, x, w1, **settings)
        calls[f"linear_reduce_scatter {method}"] = partial(linear_reduce_scatter, h, w2, **settings)
    return calls, {"m": M, "hidden": HIDDEN, "ffn": ffn}


def _ulysses(here: World) -> tuple[Calls, dict[str, Any]]:
    """The calls, and what they are of."""
    data = Data.make(MODELS[MODEL], M, here, torch.bfloat16, seed=0)
    configs = {method: OverlapConfig(method=method) for method in METHODS}
    calls = {f"attention {method}": partial(overlapped, config, here.group, data) for method, config in configs.items()}
    return dict(calls), {"model": MODEL, "tokens": M}


NODES = "nodes"
_IN_A_NODE: dict[str, Callable[[World], tuple[Calls, dict[str, Any]]]] = {"linears": _linears, "ulysses": _ulysses}
WHAT = (*_IN_A_NODE, NODES)


def _profile(call: Callable[[], Any]) -> list[Span]:
    """Device intervals of the third of three back-to-back calls after warm-up: name, stream, start and end in microseconds."""
    marker = torch.zeros(1, dtype=torch.int16, device="cuda")  # its kernels separate the calls on the compute stream
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

    # 20 ms: of three calls of a Ulysses block a slow host had the last one enqueued later than 2 ms after the first
    return device_spans(three_calls, head_start_cycles=40_000_000)


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
    fills = sorted((span for span in spans if MARKER in span["name"].lower()), key=lambda span: span["end"])
    *_, first, last = [span for span in fills if OWN_MARKER in span["name"].lower()] or fills  # older records: 32-bit
    return between(spans, first["end"], last["end"], first["stream"], MARKER)


def draw(recording: dict[str, Any], path: Path) -> Path:
    """The last recorded call of each method; of linears the column linear's on the left, the row linear's on the right."""
    calls = {tuple(title.split()): last_call(spans) for title, spans in recording["calls"].items()}
    methods, operators = in_order({method for _, method in calls}), list(dict.fromkeys(name for name, _ in calls))
    lanes = stages_of(calls.values()) if "nodes" in recording["shape"] else LANES
    height, header, unit = 0.55 + 0.25 * len(lanes), _header(recording), unit_of(calls.values())
    figure, grid = canvas(len(methods) * len(operators), len(operators), height, header, (*KINDS, "bound"), sharex=True)
    for line, method in zip(grid, methods, strict=True):
        for axes, operator in zip(line, operators, strict=True):
            if (operator, method) not in calls:
                axes.set_axis_off()
                continue
            spans = calls[operator, method]
            inside = [] if "nodes" in recording["shape"] else stored_inside(spans, method)
            draw_lanes(axes, f"{operator} by {method}:", spans, inside, unit, lanes)
            if one_after_the_other := calls.get((operator, "collective")):
                axes.axvline(perfect(one_after_the_other), color="black", linewidth=2)
    label_lanes(grid, unit, lanes)
    return save(figure, path)


def _header(recording: dict[str, Any]) -> tuple[str, ...]:
    """The title; what was called; what the colours leave out."""
    shape = recording["shape"]
    return (
        f"One forward call by each method, {shape['world']} x {recording['hardware']}",
        f"Shorter is better. {_sizes(shape)}, bf16.{WAITS if 'nodes' in shape else ''}",
        NOTE,
    )


def _sizes(shape: dict[str, Any]) -> str:
    if "tokens" in shape:
        return f"Ulysses attention block of {shape['model']}, {shape['tokens']} tokens"
    nodes = f", {shape['nodes']} nodes" if "nodes" in shape else ""
    return f"M = {shape['m']}, hidden {shape['hidden']}, FFN {shape['ffn']}{nodes}"
