"""Ulysses' linears while methods take turns (operators/trials.py).

All parts of a call run by one method, and the call is timed as a whole: the exchange of one part runs beside the product of
another. So which method runs is asked for once a call, with the first part.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..config import OverlapConfig
from ..operators.in_trial import InTrial
from ..operators.plan_book import plan_of
from ..operators.planned import Planned
from ..operators.trials import Timed, TimedBracket, Trial
from ..planning.spec import OperatorSpec
from ..runtime.domain import OverlapDomain
from .exchange import Linear, Rows
from .parts import Part


@dataclass(slots=True)  # made at each call
class Call:
    """One call of a Ulysses linear as it is planned, part by part. w: what is multiplied. bias: of w's rows, or None.

    trial, method: once the first part is planned, if methods take turns: which this call runs by.
    """

    spec: OperatorSpec
    w: torch.Tensor
    bias: torch.Tensor | None
    group: dist.ProcessGroup
    config: OverlapConfig | None
    domain: OverlapDomain
    name: str
    trial: Trial | None = None
    method: str = ""
    is_begun: bool = False

    @property
    def settings(self) -> OverlapConfig:
        return self.config or self.domain.config

    def plan(self, x: torch.Tensor) -> Planned:
        """The plan of a part x; see plan_of."""
        if not self.is_begun and self.settings.tune_steps:
            self._take_turn(x)
        self.is_begun = True
        config = self.config if self.trial is None else self.settings.by(self.method)
        return plan_of(self.spec, x, self.w, self.bias, self.group, config, self.name)

    def _take_turn(self, x: torch.Tensor) -> None:
        """Agree on a trial with the first part, and find whose turn it is."""
        planned = plan_of(self.spec, x, self.w, self.bias, self.group, self.config, self.name, tries=True)
        method = planned.next_method(self.name) if isinstance(planned, InTrial) else None
        if isinstance(planned, InTrial) and method is not None:
            self.trial, self.method = planned.in_trial, method

    def linear(self, parts: tuple[Part, ...], weight: torch.Tensor, copies: torch.Tensor | None, batch: int) -> Linear:
        """The call of these parts, ready to run. weight, copies, batch: see exchange.Linear."""
        w = self.w.detach()
        if self.trial is None:
            return Linear(parts, weight, w, copies, batch)
        return TimedLinear(parts, weight, w, copies, batch, self.trial, self.name, self.method)


@dataclass
class TimedLinear(Linear):
    """A call that is timed, for a trial: forward, and backward where it gives an input gradient."""

    trial: Trial
    name: str
    method: str

    def _timed(self, kind: str) -> AbstractContextManager[None]:
        work = self.rows_of_rank * self.world_size * self.w.numel()  # of all parts
        return TimedBracket(nullcontext(), self.trial, Timed(self.name, kind, self.method, work))

    def _timed_backward(self, wants_dx: bool) -> AbstractContextManager[None]:
        return self._timed(self.trial.fprop.dgrad.kind) if wants_dx else nullcontext()

    def to_heads(self, x: torch.Tensor, y: Rows) -> torch.Tensor:
        with self._timed(self.trial.fprop.kind):
            return super().to_heads(x, y)

    def to_rows(self, x: Rows, keep: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with self._timed(self.trial.fprop.kind):
            return super().to_rows(x, keep)

    def heads_backward(
        self, x: torch.Tensor | None, dy: Rows, wants_dx: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        with self._timed_backward(wants_dx):
            return super().heads_backward(x, dy, wants_dx)

    def rows_backward(
        self, x: Rows | list[torch.Tensor] | None, dy: torch.Tensor, dx: Rows | None
    ) -> torch.Tensor | None:
        with self._timed_backward(dx is not None):
            return super().rows_backward(x, dy, dx)
