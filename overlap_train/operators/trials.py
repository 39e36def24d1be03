"""The first calls of a linear by each method in turn: which is fastest is measured where it counts, in training itself.

    call of a linear    1        2       3            4        5      ...   tune_steps + 1
    method              direct   fused   chunked      direct   fused  ...   the fastest, for all linears of about these sizes

The backward of a call runs by the method of its forward; the two are timed apart. All ranks make the same calls, so all try the
same method at the same time. trial_book.py begins and ends a trial.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TypeAlias

import torch

from ..planning.arguments import Request
from ..planning.passes import Pass
from .planned import Planned, PlannedLinear

_MOST_SAMPLES = 64  # of a pass by a method: with 80 layers of one shape there would be hundreds
Mark: TypeAlias = float | torch.cuda.Event


class Trial:
    """What was measured so far of linears of about the same sizes.

    fprop: the forward pass of the linear that began. methods: those that take turns. steps: calls of one linear until it ends.
    """

    def __init__(self, fprop: Pass, methods: tuple[str, ...], steps: int, device: torch.device) -> None:
        self.fprop, self.methods, self.steps, self.device = fprop, methods, steps, device
        self._calls: dict[str, int] = {}
        self._samples: dict[tuple[str, str], list[tuple[Mark, Mark, int]]] = defaultdict(list)

    def next_turn(self, name: str) -> int:
        """Whose turn it is in this call of a linear, as an index of `methods`."""
        calls = self._calls.get(name, 0)
        self._calls[name] = calls + 1
        return calls % len(self.methods)

    def is_due(self, name: str) -> bool:
        """Whether this linear has made its calls: the next one ends the trial."""
        return self._calls.get(name, 0) >= self.steps

    def mark(self) -> Mark | None:
        """Now; on a GPU, when the caller's stream comes to it. None in a CUDA graph, whose events have no time."""
        if self.device.type != "cuda":
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, kind: str, method: str, begin: Mark, rows: int) -> None:
        """A pass over so many global rows has just ended."""
        samples, end = self._samples[kind, method], self.mark()
        if len(samples) < _MOST_SAMPLES and end is not None:
            samples.append((begin, end, rows))

    def times(self) -> dict[tuple[str, str], float]:
        """Milliseconds of each pass by each method, for the rows of `fprop`: medians without the first, which compiles. Waits
        for the GPU."""
        return {
            key: median(_ms(begin, end) / rows for begin, end, rows in samples[1:]) * self.fprop.m
            for key, samples in self._samples.items()
            if len(samples) > 1
        }


def _ms(begin: Mark, end: Mark) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return 1e3 * (end - begin)  # type: ignore[operator]
    end.synchronize()
    return begin.elapsed_time(end)


class _Timed:
    """The bracket of a pass, timed. One that raises is not counted."""

    def __init__(self, bracket: AbstractContextManager[None], trial: Trial, kind: str, method: str, rows: int) -> None:
        self._bracket, self._trial, self._kind, self._method, self._rows = bracket, trial, kind, method, rows

    def __enter__(self) -> None:
        self._begin = self._trial.mark()
        self._bracket.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._bracket.__exit__(*raised)  # type: ignore[arg-type]
        if raised[0] is None and self._begin is not None:
            self._trial.add(self._kind, self._method, self._begin, self._rows)


@dataclass(frozen=True, kw_only=True)
class _TriedLinear(PlannedLinear):
    trial: Trial
    method: str
    rows: int

    @cached_property
    def forward(self) -> AbstractContextManager[None]:
        return self._timed(super().forward, self.trial.fprop)

    def _new_backward(self, wants_dx: bool, wants_dw: bool) -> AbstractContextManager[None]:
        bracket = super()._new_backward(wants_dx, wants_dw)
        return self._timed(bracket, self.trial.fprop.dgrad) if wants_dx else bracket

    def _timed(self, bracket: AbstractContextManager[None], pass_: Pass) -> AbstractContextManager[None]:
        return _Timed(bracket, self.trial, pass_.kind, self.method, self.rows)


@dataclass(frozen=True, kw_only=True)
class Candidate(Planned):
    """A plan by one of the methods that take turns. rows: global rows of a call."""

    in_trial: Trial
    method: str
    rows: int

    def _new_linear(self, name: str, meaning: str) -> PlannedLinear:
        like = super()._new_linear(name, meaning)
        return _TriedLinear(
            like.domain, like.plan, like.tags, like.keeps, trial=self.in_trial, method=self.method, rows=self.rows
        )


@dataclass(frozen=True, kw_only=True)
class InTrial(Planned):
    """The plan that `auto` would take, which Ulysses' parts do, and the candidates, which take turns in calls of linear.py."""

    in_trial: Trial
    candidates: tuple[Candidate, ...]

    @property
    def trial(self) -> Trial:
        """In which they take turns."""
        return self.in_trial

    @property
    def request(self) -> Request:
        """What all of them need."""
        asked = self.plan.request
        requests = (asked, *(candidate.plan.request for candidate in self.candidates))
        return Request(
            asked.operator,
            f"{asked.what}; tries {', '.join(self.in_trial.methods)}",
            max(request.slot_bytes for request in requests),
            max(request.flagged_bytes for request in requests),
        )

    @property
    def compares(self) -> bool:
        """Not by `collective`, which always takes its turn."""
        return False

    def is_due(self, name: str) -> bool:
        """In a CUDA graph ranks cannot tell each other anything."""
        return self.in_trial.is_due(name) and not self.domain.is_capturing()

    def next_call(self, name: str) -> PlannedLinear:
        """By the method whose turn it is. A CUDA graph gets the first one, which has run before and stays in it."""
        turn = 0 if self.domain.is_capturing() else self.in_trial.next_turn(name)
        return self.candidates[turn].linear(name)
