"""Plans that take turns in a linear's first calls (trials.py)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, reduce

from ..config import flag_name
from ..planning.arguments import Request
from ..select.autotune import Autotune as Trial
from ..select.autotune import Timed, TimedBracket
from ..warn import warn_user
from .planned import Planned, PlannedLinear


@dataclass(frozen=True, kw_only=True)
class _TriedLinear(PlannedLinear):
    trial: Trial
    name: str
    method: str
    work: int

    @cached_property
    def forward(self) -> AbstractContextManager[None]:
        return self._timed(super().forward, self.trial.fprop.kind)

    def _new_backward(self, wants_dx: bool, wants_dw: bool) -> AbstractContextManager[None]:
        bracket = super()._new_backward(wants_dx, wants_dw)
        return self._timed(bracket, self.trial.fprop.dgrad.kind) if wants_dx else bracket

    def _timed(self, bracket: AbstractContextManager[None], kind: str) -> AbstractContextManager[None]:
        return TimedBracket(bracket, self.trial, Timed(self.name, kind, self.method, self.work))


@dataclass(frozen=True, kw_only=True)
class Candidate(Planned):
    """A plan by one of the methods that take turns. work: of a call (trials.py)."""

    in_trial: Trial
    method: str
    work: int

    def _new_linear(self, name: str, meaning: tuple[str, ...]) -> PlannedLinear:
        like = super()._new_linear(name, meaning)
        return _TriedLinear(
            like.domain,
            like.plan,
            like.tags,
            like.keeps,
            trial=self.in_trial,
            name=name,
            method=self.method,
            work=self.work,
        )


@dataclass(frozen=True, kw_only=True)
class InTrial(Planned):
    """The plan that `auto` would take, and those that take turns. The former runs each linear's first call, CUDA graphs, and the
    turns of methods that do not serve these sizes. It is not timed."""

    in_trial: Trial
    candidates: tuple[Planned, ...]

    @property
    def request(self) -> Request:
        """The Request that covers all candidates. It names the methods."""
        trial, requests = self.in_trial, (candidate.plan.request for candidate in self.candidates)
        needed = reduce(Request.covering, requests, self.plan.request)
        return replace(needed, what=f"{needed.what}; tries {', '.join(trial.methods)} in {trial.steps} calls")

    @property
    def compares(self) -> bool:
        """False: signals do not find a rank that has another number of rows in `collective`, which always takes its turn."""
        return False

    @property
    def trial(self) -> Trial | None:
        """The trial; None in a CUDA graph, which keeps its plan whatever the trial finds."""
        return None if self.domain.is_capturing() else self.in_trial

    def is_due(self, name: str) -> bool:
        """Whether the trial ends before the next call of the linear `name`. Never in a CUDA graph, where ranks cannot tell each
        other anything."""
        return self.in_trial.is_due(name) and not self.domain.is_capturing()

    def next_call(self, name: str) -> PlannedLinear:
        """The linear `name` by the method whose turn it is."""
        return self._candidate(name).linear(name)

    def next_method(self, name: str) -> str | None:
        """The method by which the linear `name` is to run in its next call, for callers that make it of several plans; None where
        the plan that `auto` would take has it."""
        candidate = self._candidate(name)
        return candidate.method if isinstance(candidate, Candidate) else None

    def _candidate(self, name: str) -> Planned:
        if self.domain.is_capturing():
            self._note_capture(name)
            return self
        turn = self.in_trial.next_turn(name)
        return self if turn is None else self.candidates[turn]

    def _note_capture(self, name: str) -> None:
        """Replays are no calls, so they never end a trial: rank 0 of the group says it once."""
        trial = self.in_trial
        if not trial.captured and self.domain.rank == 0:
            warn_user(
                f"tune_steps={trial.steps}: a CUDA graph captures {name} after {trial.calls(name)} calls, before the ranks have "
                f"compared its methods; the graph keeps the untuned plan; capture later (Megatron: raise "
                f"--cuda-graph-warmup-steps; a step has a call for each micro-batch), or lower {flag_name('tune_steps')}"
            )
        trial.captured.add(name)
