"""A time axis of GPU work: what computes, what communicates, and which communication nothing hides.

A recording is {"hardware", "torch", "shape", "calls"}, where calls has the spans of each "operator method". The profiler sees
kernels from begin to end: what one waits inside itself counts as computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .style import SMALL, canvas, in_order, look_of, outline, save

Span = dict[str, Any]  # name, stream, start and end in microseconds, and kind where it is known
Interval = tuple[float, float]  # start and end

MARKER = "fillfunctor"  # the kernel between two calls
OWN_MARKER = f"{MARKER}<short>"  # of 16-bit integers, with which no model fills anything
COMPUTATION, COMMUNICATION = ("gemm", "compute"), ("communication", "waiting")
STORING = ("all_gather_gemm", "all_to_all_gemm", "gemm_reduce_scatter")  # kernels of `direct` that store at the peers
# What a picture has above each other, from below. Across nodes waits are in none.
LANES: tuple[str, ...] = ("communication", "kernels")
STAGES = ("network", "sums", "inside nodes", "products")


def lane_of(span: Span, lanes: Sequence[str]) -> str:
    """The lane that a span is drawn in."""
    if lanes == LANES:
        return "communication" if span["kind"] in COMMUNICATION else "kernels"
    if "nccl" in span["name"].lower():
        return "network"
    if "add_blocks" in span["name"]:
        return "sums"
    return {"communication": "inside nodes", "waiting": ""}.get(span["kind"], "products")


def kind_of(span: Span, compute_stream: int) -> str:
    """gemm, compute (other kernels), communication, waiting (a kernel that waits for a peer), or "" for a marker."""
    name = span["name"].lower()
    if MARKER in name:
        return ""
    if "nccl" in name or "memcpy ptop" in name or ("memcpy" in name and span["stream"] != compute_stream):
        return "communication"
    if any(part in name for part in ("flash", "fmha", "sdpa")):  # attention; torch's names its types as cutlass::...
        return "compute"
    if any(part in name for part in ("gemm", "nvjet", "cutlass")):
        return "gemm"
    return "waiting" if any(part in name for part in ("wait", "meet_kernel", "barrier")) else "compute"


def last_call(spans: Sequence[Span]) -> list[Span]:
    """The work between the last two markers, each span with its kind, starting at 0. Markers run on the compute stream, which
    every call joins."""
    fills = sorted((span for span in spans if MARKER in span["name"].lower()), key=lambda span: span["end"])
    *_, first, last = [span for span in fills if OWN_MARKER in span["name"].lower()] or fills  # older records: 32-bit
    begin, end = first["end"], last["end"]
    return [
        {**span, "kind": kind, "start": span["start"] - begin, "end": span["end"] - begin}
        for span in spans
        if begin <= span["start"] < end and (kind := kind_of(span, first["stream"]))
    ]


def union(spans: Iterable[Span], kinds: tuple[str, ...]) -> list[Interval]:
    """The intervals in which anything of these kinds runs; they do not touch."""
    merged: list[Interval] = []
    for start, end in sorted((span["start"], span["end"]) for span in spans if span["kind"] in kinds):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def exposed(spans: Sequence[Span]) -> list[Interval]:
    """The intervals in which GPUs communicate or wait for each other and nothing is computed."""
    busy, parts = union(spans, COMPUTATION), []
    for start, end in union(spans, COMMUNICATION):
        for busy_start, busy_end in busy:
            parts.append((start, min(busy_start, end)))
            start = max(start, busy_end)
        parts.append((start, end))
    return [(start, end) for start, end in parts if end > start]


def total(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def perfect(spans: Sequence[Span]) -> float:
    """How long this call took if one of its kinds of work hid the other."""
    return max(total(union(spans, kinds)) for kinds in (COMPUTATION, COMMUNICATION))


def draw(recording: dict[str, Any], path: Path) -> Path:
    """The last recorded call of each method; of linears the column linear's on the left, the row linear's on the right."""
    calls = {tuple(title.split()): last_call(spans) for title, spans in recording["calls"].items()}
    methods, operators = in_order({method for _, method in calls}), list(dict.fromkeys(name for name, _ in calls))
    hierarchical, lanes = "nodes" in recording["shape"], LANES
    if hierarchical:
        used = {lane_of(span, STAGES) for spans in calls.values() for span in spans}
        lanes = tuple(lane for lane in STAGES if lane in used)  # a node of one rank adds nothing
    explained = ("gemm", "compute", "hidden", "exposed", "inside", "bound")
    count, height = len(methods) * len(operators), 0.55 + 0.25 * len(lanes)
    figure, grid = canvas(count, len(operators), height, _header(recording), explained, sharex=True)
    for line, method in zip(grid, methods, strict=True):
        for axes, operator in zip(line, operators, strict=True):
            if (operator, method) not in calls:
                axes.set_axis_off()
                continue
            storing = STORING if method == "direct" and not hierarchical else ()
            _draw_lanes(axes, f"{operator} by {method}:", calls[operator, method], storing, lanes)
            if one_after_the_other := calls.get((operator, "collective")):
                axes.axvline(perfect(one_after_the_other), color="black", linewidth=2)
    for axes in grid.flat:
        axes.set_yticks([height + 0.4 for height in range(len(lanes))], lanes)
        axes.tick_params(left=False, labelleft=axes in grid[:, 0])
    for axes in grid[-1]:
        axes.set_xlabel("ms")
        axes.xaxis.set_major_formatter(lambda tick, _: f"{tick / 1000:g}")
    return save(figure, path)


def _draw_lanes(axes: Any, title: str, spans: Sequence[Span], storing: tuple[str, ...], lanes: Sequence[str]) -> None:
    """Lane above lane; the title says how long it took and how much of that was exposed. storing: kernels with an outline."""
    bare, length = exposed(spans), max((span["end"] for span in spans), default=0.0)
    for height, lane in enumerate(lanes):
        here = [span for span in spans if lane_of(span, lanes) == lane]
        sent = union(here, COMMUNICATION)
        both = [(max(a, c), min(b, d)) for a, b in bare for c, d in sent]
        shown = [(start, end) for start, end in both if end > start]
        parts = {kind: union(here, (kind,)) for kind in COMPUTATION} | {"hidden": sent, "exposed": shown}
        for name in ("compute", "gemm", "hidden", "exposed"):
            bars = [(start, end - start) for start, end in parts[name]]
            axes.broken_barh(bars, (height, 0.8), color=look_of(name).colour, linewidth=0.4)
    inside = [(s["start"], s["end"] - s["start"]) for s in spans if any(name in s["name"] for name in storing)]
    axes.broken_barh(inside, (0.06, 0.68), **outline())
    axes.set_title(f"{title} {length / 1000:.2f} ms, {total(bare) / 1000:.2f} exposed", fontsize=SMALL)
    axes.set_ylim(-0.1, len(lanes) - 0.1)


def _header(recording: dict[str, Any]) -> tuple[str, ...]:
    """The title; what was called; what the colours leave out."""
    shape, nodes = recording["shape"], ""
    if "nodes" in shape:
        nodes = f", {shape['nodes']} nodes"
    if "tokens" in shape:
        sizes = f"Ulysses attention block of {shape['model']}, {shape['tokens']} tokens"
    else:
        sizes = f"M = {shape['m']}, hidden {shape['hidden']}, FFN {shape['ffn']}{nodes}"
    return (
        f"One forward call by each method, {shape['world']} x {recording['hardware']}",
        f"Shorter is better. {sizes}, bf16.{' Waits are not drawn, but count as exposed.' if nodes else ''}",
        "Exposed: the GPU computes nothing meanwhile. What a kernel waits inside itself counts as GEMM.",
    )
