"""A time axis of GPU work: what computes, what communicates, and which communication nothing hides.

The profiler sees kernels from begin to end: what one waits inside itself counts as computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .style import SMALL, look_of, outline

Span = dict[str, Any]  # name, stream, start and end in microseconds, and kind where it is known
Interval = tuple[float, float]  # start and end

COMPUTATION, COMMUNICATION = ("gemm", "compute"), ("communication", "waiting")
WAITS = " Waits are not drawn, but count as exposed."  # where lanes are STAGES
KINDS = ("gemm", "compute", "hidden", "exposed", "inside")  # what a legend explains
STORING = ("all_gather_gemm", "all_to_all_gemm", "gemm_reduce_scatter")  # kernels that may store at the peers
LONG = 5000.0  # microseconds: where a call takes longer, its picture is in milliseconds
NOTE = "Exposed: the GPU computes nothing meanwhile. What a kernel waits inside itself counts as GEMM."


def kind_of(span: Span, compute_stream: int, marker: str) -> str:
    """gemm, compute (other kernels), communication, waiting (a kernel that waits for a peer), or "" for a marker."""
    name = span["name"].lower()
    if marker in name:
        return ""
    if "nccl" in name or "memcpy ptop" in name or ("memcpy" in name and span["stream"] != compute_stream):
        return "communication"
    if any(part in name for part in ("flash", "fmha", "sdpa")):  # attention; torch's names its types as cutlass::...
        return "compute"
    if any(part in name for part in ("gemm", "nvjet", "cutlass")):
        return "gemm"
    return "waiting" if any(part in name for part in ("wait", "meet_kernel", "barrier")) else "compute"


def between(spans: Sequence[Span], begin: float, end: float, compute_stream: int, marker: str) -> list[Span]:
    """What starts from `begin` to `end`, each with its kind, in microseconds from `begin`; without markers."""
    here = [{**span, "kind": kind_of(span, compute_stream, marker)} for span in spans if begin <= span["start"] < end]
    return [{**span, "start": span["start"] - begin, "end": span["end"] - begin} for span in here if span["kind"]]


def union(spans: Iterable[Span], kinds: tuple[str, ...]) -> list[Interval]:
    """The intervals (start, end) in which anything of these kinds runs; they do not touch."""
    merged: list[Interval] = []
    for start, end in sorted((span["start"], span["end"]) for span in spans if span["kind"] in kinds):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def exposed(spans: Sequence[Span]) -> list[Interval]:
    """The intervals (start, end) in which GPUs communicate or wait for each other and nothing is computed."""
    busy, parts = union(spans, COMPUTATION), []
    for start, end in union(spans, COMMUNICATION):
        for busy_start, busy_end in busy:
            parts.append((start, min(busy_start, end)))
            start = max(start, busy_end)
        parts.append((start, end))
    return [(start, end) for start, end in parts if end > start]


def perfect(spans: Sequence[Span]) -> float:
    """How long this call took if one of its kinds of work hid the other."""
    return max(sum(end - start for start, end in union(spans, kinds)) for kinds in (COMPUTATION, COMMUNICATION))


def stored_inside(spans: Sequence[Span], method: str) -> list[Interval]:
    """Kernels of operators inside one node that store at the peers themselves: all of `direct`, none of the other methods."""
    own = [(span["start"], span["end"]) for span in spans if any(name in span["name"] for name in STORING)]
    return own if method == "direct" else []


def common(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What lies in both."""
    found = [(max(a, c), min(b, d)) for a, b in some for c, d in others]
    return [(start, end) for start, end in found if end > start]


@dataclass(frozen=True)
class Lane:
    """A line of a picture. holds: whether a span is drawn in it."""

    label: str
    holds: Callable[[Span], bool]


def _communicates(span: Span) -> bool:
    return span["kind"] in COMMUNICATION


def _crosses(span: Span) -> bool:
    return "nccl" in span["name"].lower()


def _adds(span: Span) -> bool:
    return "add_blocks" in span["name"]


# From below to above.
LANES = (Lane("communication", _communicates), Lane("kernels", lambda span: not _communicates(span)))
STAGES = (  # of a call across nodes
    Lane("network", _crosses),
    Lane("sums", _adds),
    Lane("inside nodes", lambda span: span["kind"] == "communication" and not _crosses(span)),
    Lane("products", lambda span: not _communicates(span) and not _adds(span)),
)


def stages_of(calls: Iterable[Sequence[Span]]) -> tuple[Lane, ...]:
    """The STAGES that any of these calls has: a node of one rank adds nothing."""
    spans = [span for call in calls for span in call]
    return tuple(lane for lane in STAGES if any(lane.holds(span) for span in spans))


@dataclass(frozen=True)
class Unit:
    """Of all times of a picture. name: on axes. sign: in titles, with so many digits after the point."""

    name: str
    sign: str
    microseconds: float
    digits: int

    def shown(self, length: float) -> str:
        """A time in microseconds as a number of this unit."""
        return f"{length / self.microseconds:.{self.digits}f}"


MICROSECONDS, MILLISECONDS = Unit("microseconds", "µs", 1.0, 0), Unit("milliseconds", "ms", 1000.0, 2)


def length_of(spans: Sequence[Span]) -> float:
    """How long a call took, in microseconds."""
    return max((span["end"] for span in spans), default=0.0)


def unit_of(calls: Iterable[Sequence[Span]]) -> Unit:
    """The unit of a picture of these calls. All panels have the same: a reader compares them."""
    return MILLISECONDS if max(map(length_of, calls)) >= LONG else MICROSECONDS


def draw_lanes(
    axes: Any, title: str, spans: Sequence[Span], inside: list[Interval], unit: Unit, lanes: Sequence[Lane] = LANES
) -> None:
    """Lane above lane; the title says how long it took and how much of that was exposed.

    inside: when kernels store at the peers (stored_inside).
    """
    bare, length = exposed(spans), length_of(spans)
    for height, lane in enumerate(lanes):
        here = [span for span in spans if lane.holds(span)]
        sent = union(here, COMMUNICATION)
        parts = {kind: union(here, (kind,)) for kind in COMPUTATION} | {"hidden": sent, "exposed": common(bare, sent)}
        for name in ("compute", "gemm", "hidden", "exposed"):
            bars = [(start, end - start) for start, end in parts[name]]
            axes.broken_barh(bars, (height, 0.8), color=look_of(name).colour, linewidth=0.4)
    axes.broken_barh([(start, end - start) for start, end in inside], (0.06, 0.68), **outline())
    part = unit.shown(sum(end - start for start, end in bare))
    axes.set_title(f"{title} {unit.shown(length)} {unit.sign}, {part} exposed", fontsize=SMALL)
    axes.set_ylim(-0.1, len(lanes) - 0.1)


def label_lanes(grid: Any, unit: Unit, lanes: Sequence[Lane] = LANES) -> None:
    """Names of the lanes on the left, of the unit below."""
    for axes in grid.flat:
        axes.set_yticks([height + 0.4 for height in range(len(lanes))], [lane.label for lane in lanes])
        axes.tick_params(left=False, labelleft=axes in grid[:, 0])
    for axes in grid[-1]:
        axes.set_xlabel(unit.name)
        axes.xaxis.set_major_formatter(lambda tick, _: f"{tick / unit.microseconds:g}")
