"""A plan's timelines as spans of the benchmark's pictures, and as a Chrome trace (chrome://tracing, ui.perfetto.dev)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .prediction import Prediction
from .simulation.timeline import COPIES, Span, Timeline


def as_recorded(timeline: Timeline, without_copies: bool = False) -> list[dict[str, Any]]:
    """A timeline's spans as those of the profiler are drawn: name, kind, start and end in microseconds. The profiler sees no
    stores of kernels to peers; without_copies leaves out copies."""
    return [
        {"name": span.name, "kind": span.kind, "stream": span.lane, "start": span.start, "end": span.end}
        for span in timeline.spans
        if not (without_copies and span.lane == COPIES)
    ]


def write_trace(path: Path, predictions: Sequence[Prediction]) -> None:
    """A process for each pass by each method, chosen ones first; kernels, copies and tiles are its threads."""
    events: list[dict[str, Any]] = []
    calls = [(p, e) for p in predictions for e in p.by_method.values()]
    calls.sort(key=lambda call: call[1] is not call[0].chosen)
    for pid, (p, e) in enumerate(calls):
        chosen = " (chosen)" if e is p.chosen else ""
        name = {"name": f"{p.linear} {p.direction} by {e.method}{chosen}"}
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": name})
        events += [_event(pid, span) for span in (*e.timeline.spans, *(e.timeline.tiles if chosen else ()))]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _event(pid: int, span: Span) -> dict[str, Any]:
    found = {"ph": "X", "name": span.name, "cat": span.kind, "pid": pid, "tid": span.lane}
    found |= {"ts": round(span.start, 3), "dur": round(span.end - span.start, 3)}
    return {**found, "args": {"place": list(span.place)}} if span.place else found
