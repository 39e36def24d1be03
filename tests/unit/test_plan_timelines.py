"""The planner against the recorded timelines of single calls: how long each took, and when each copy was done.

A few calls after a pause run at a higher clock than the benchmark's bursts. So the rate of products is taken from one product of
the same timeline, the library's in the call by NCCL; everything else is the planner's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_train.planning.machines import SYSTEMS, System
from overlap_train.planning.table import UNTUNED
from overlap_train.schedule.order import GATHER, SCATTER
from overlap_train.select.passes import Pass
from overlap_train.tools.bench.timeline import last_call
from overlap_train.tools.plan.estimates import Estimate, estimate, work_of
from overlap_train.tools.plan.simulation.programs import program
from overlap_train.tools.plan.simulation.timeline import COPIES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RECORDS = ("h200x2", "h200x4", "h100x2", "h100x4")
SHORTEST_COPY_US = 5.0  # shorter ones are signals
COLLIDED = ("h200x4", GATHER, "fused")  # in that call the ranks were not in step, and copies took up to twice as long


@dataclass(frozen=True)
class Compared:
    record: str
    kind: str
    method: str
    planned: Estimate
    measured: list[dict[str, Any]]

    @property
    def measured_us(self) -> float:
        return max(span["end"] for span in self.measured)

    @property
    def copies(self) -> Iterator[tuple[float, float]]:
        """When each copy was done, planned and measured, as parts of the call."""
        planned = [span.end / self.planned.device_us for span in self.planned.timeline.spans if span.lane == COPIES]
        long = [s for s in self.measured if "Memcpy PtoP" in s["name"] and s["end"] - s["start"] > SHORTEST_COPY_US]
        return zip(planned, (span["end"] / self.measured_us for span in long), strict=True)


@cache
def compared(record: str) -> list[Compared]:
    recording = json.loads((BENCHMARKS / record / "timeline.json").read_text())
    shape, found = recording["shape"], []
    for title, spans in recording["calls"].items():
        operator, method = title.split()
        kind = GATHER if operator == "all_gather_linear" else SCATTER
        pass_ = _pass(kind, shape["m"], shape["hidden"], shape["ffn"], shape["world"])
        alone = last_call(recording["calls"][f"{operator} collective"])
        work = work_of(_at_clock_of(alone, pass_), pass_, method, UNTUNED, is_alone=True)
        found.append(Compared(record, kind, method, estimate(work, program(work)), last_call(spans)))
    return found


def _pass(kind: str, m: int, hidden: int, ffn: int, world: int) -> Pass:
    n, k = (ffn // world, hidden) if kind == GATHER else (hidden, ffn // world)
    return Pass(kind, m, n, k, torch.bfloat16, world)


def _at_clock_of(spans: list[dict[str, Any]], pass_: Pass) -> System:
    """H200 with the rate of the library's product in a call."""
    us = sum(span["end"] - span["start"] for span in spans if span["kind"] == "gemm")
    rate = 2e-6 * pass_.m * pass_.n * pass_.k / us
    return replace(SYSTEMS["h200"], burst_tflops=rate, sustained_tflops=rate, tile_tflops=1.1 * rate)


@pytest.mark.parametrize("record", RECORDS)
def test_every_call_takes_what_was_measured(record: str) -> None:
    errors = {(c.kind, c.method): c.planned.device_us / c.measured_us - 1 for c in compared(record)}
    assert len(errors) == 8
    assert max(map(abs, errors.values())) < 0.10, errors
    assert sum(map(abs, errors.values())) / len(errors) < 0.05, errors


@pytest.mark.parametrize("record", RECORDS)
def test_every_copy_is_done_when_it_was_measured(record: str) -> None:
    for one in compared(record):
        if one.method in ("fused", "chunked"):
            pairs = list(one.copies)
            assert pairs, "nothing was copied"
            if (one.record, one.kind, one.method) != COLLIDED:
                assert all(planned == pytest.approx(measured, abs=0.05) for planned, measured in pairs)
