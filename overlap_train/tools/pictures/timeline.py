"""A time axis of GPU work: what computes, what communicates, and which communication nothing hides.

A recording is {"hardware", "torch", "shape", "calls"}, where calls has the spans of each "operator method". The profiler sees
kernels from begin to end: what one waits inside itself counts as computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..measure.profile import Interval, Span, total, union
from .style import SMALL, canvas, in_order, look_of, save

MARKER = "fillfunctor"  # a kernel that fills memory
OWN_MARKER = f"{MARKER}<short>"  # the one between two calls: of 16-bit integers, with which no model fills anything
COMPUTATION, COMMUNICATION = ("gemm", "compute"), ("communication", "waiting")
LANES = (("hidden", "exposed"), COMPUTATION)  # what is drawn above each other, from below


def kind_of(span: Span, compute_stream: int) -> str:
    """gemm, compute (other kernels), communication, waiting (a kernel that waits for a peer), or "" for a marker."""
    name = span["name"].lower()
    if MARKER in name:
        return ""
    if "nccl" in name or "memcpy ptop" in name or ("memcpy" in name and span["stream"] != compute_stream):
        return "communication"
    if any(part in name for part in ("gemm", "nvjet", "cutlass")):
        return "gemm"
    return "waiting" if any(part in name for part in ("wait", "barrier")) else "compute"


def last_call(spans: Sequence[Span]) -> list[Span]:
    """The work between the last two markers, each span with its kind, starting at 0. Markers run on the compute stream, which
    every call joins."""
    markers = (span for span in spans if OWN_MARKER in span["name"].lower())
    *_, first, last = sorted(markers, key=lambda span: span["end"])
    begin, end = first["end"], last["end"]
    return [
        {**span, "kind": kind, "start": span["start"] - begin, "end": span["end"] - begin}
        for span in spans
        if begin <= span["start"] < end and (kind := kind_of(span, first["stream"]))
    ]


def of_kinds(spans: Iterable[Span], kinds: tuple[str, ...]) -> list[Interval]:
    """The intervals in which anything of these kinds runs."""
    return union(span for span in spans if span["kind"] in kinds)


def exposed(spans: Sequence[Span]) -> list[Interval]:
    """The intervals in which GPUs communicate or wait for each other and nothing is computed."""
    busy, parts = of_kinds(spans, COMPUTATION), []
    for start, end in of_kinds(spans, COMMUNICATION):
        for busy_start, busy_end in busy:
            parts.append((start, min(busy_start, end)))
            start = max(start, busy_end)
        parts.append((start, end))
    return [(start, end) for start, end in parts if end > start]


def perfect(spans: Sequence[Span]) -> float:
    """How long this call took if one of its kinds of work hid the other."""
    return max(total(of_kinds(spans, kinds)) for kinds in (COMPUTATION, COMMUNICATION))


def draw(recording: dict[str, Any], path: Path) -> Path:
    """The last recorded call of each method: the column linear's on the left, the row linear's on the right."""
    from matplotlib.patches import Patch

    calls = {tuple(title.split()): last_call(spans) for title, spans in recording["calls"].items()}
    methods, operators = in_order({method for _, method in calls}), list(dict.fromkeys(name for name, _ in calls))
    shape = recording["shape"]
    header = (
        f"One forward call by each method, {shape['world']} x {recording['hardware']}",
        f"Shorter is better. M = {shape['m']}, hidden {shape['hidden']}, FFN {shape['ffn']}, bf16. Line: perfect overlap.",
        "Exposed: the GPU computes nothing meanwhile. What a kernel waits inside itself counts as GEMM.",
    )
    figure, grid = canvas(len(calls), len(operators), 1.05, header)
    looks = [look_of(name) for lane in reversed(LANES) for name in lane]
    handles = [Patch(color=look.colour, label=look.label) for look in looks]
    figure.legend(handles=handles, loc="outside lower left", frameon=False, ncols=len(handles))
    for line, method in zip(grid, methods, strict=True):
        for axes, operator in zip(line, operators, strict=True):
            _draw_lanes(axes, f"{operator} by {method}:", calls[operator, method])
            axes.axvline(perfect(calls[operator, "collective"]), color="black", linewidth=2)
        line[0].set_yticks([0.4, 1.4], ["communication", "kernels"])
    for axes in grid[-1]:
        axes.set_xlabel("ms")
        axes.xaxis.set_major_formatter(lambda tick, _: f"{tick / 1000:g}")
    return save(figure, path)


def _draw_lanes(axes: Any, title: str, spans: Sequence[Span]) -> None:
    """Lane above lane; the title says how long it took and how much of that was exposed."""
    bare, length = exposed(spans), max((span["end"] for span in spans), default=0.0)
    parts = {kind: of_kinds(spans, (kind,)) for kind in COMPUTATION}
    parts |= {"hidden": of_kinds(spans, COMMUNICATION), "exposed": bare}
    for height, lane in enumerate(LANES):
        for name in lane:
            intervals = [(start, end - start) for start, end in parts[name]]
            axes.broken_barh(intervals, (height, 0.8), color=look_of(name).colour, linewidth=0.4)
    axes.set_title(f"{title} {length / 1000:.2f} ms, {total(bare) / 1000:.2f} exposed", fontsize=SMALL)
    axes.set(yticks=[], ylim=(-0.1, 1.9))
