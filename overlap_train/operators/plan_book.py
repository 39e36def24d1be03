"""The plans of one domain, made and agreed on at the first call with some shapes. call_plan.py is how calls get theirs."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import torch
import torch.distributed as dist

from ..config import OverlapConfig
from ..planning.arguments import Request
from ..planning.cache import BoundedCache
from ..planning.spec import OperatorSpec
from ..runtime.domain import OverlapDomain
from ..runtime.prepare import prepare
from ..select.autotune import Autotune as Trial
from ..select.table import Table
from .planned import Planned
from .runs_here import other_table, why_not_here
from .settled import settled_plan
from .trial_book import TrialBook
from .tuning_file import read

_MOST_PLANS = 1024


class PlanBook:
    """What one domain has decided so far, and the measurements that `auto` goes by, the same on all ranks."""

    def __init__(self, domain: OverlapDomain, measured: Table) -> None:
        self.domain, self.topology, self.table = domain, domain.topology, measured
        # By what all ranks have in common; then by how this rank's weight lies in memory, which its peers need not know.
        self.plans: BoundedCache[tuple[object, ...], dict[object, Planned]] = BoundedCache(_MOST_PLANS)
        # Keys without the rows: of calls that were agreed on with some number of them.
        self.agreed: BoundedCache[tuple[object, ...], bool] = BoundedCache(_MOST_PLANS)
        # What ranks agreed on before the last trial ended. A plan that is made again as it was needs no agreement, and a CUDA
        # graph may take it, because it has run.
        self.before: BoundedCache[tuple[object, ...], Request] = BoundedCache(_MOST_PLANS)
        self.trials = TrialBook(domain)
        # By the TP group of calls that exchange in this domain: what ulysses/groups.py found of both.
        self.nodes_with: dict[dist.ProcessGroup, tuple[int, int]] = {}

    @classmethod
    def of_group(cls, domain: OverlapDomain, name: str) -> PlanBook:
        """That of a group's first call. Collective. name: of the linear that asks, for errors."""
        domain.agreement.exchange(None, f"{name}: the group's first call", kind="first call of a group")
        what = f"{name}: read the tuning table before the group's first call"
        return cls(domain, domain.agreement.exchange(read(domain), what, kind="tuning table")[0])

    def look_up(
        self,
        spec: OperatorSpec,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        config: OverlapConfig | None,
        tries: bool = False,
    ) -> tuple[tuple[object, ...], Planned | None]:
        """The key of a call, and its plan if it was agreed on."""
        trains = (x.requires_grad, w.requires_grad) if torch.is_grad_enabled() else None
        shape_of_bias = None if bias is None else (bias.shape, bias.dtype, bias.device)
        key = (spec.name, x.shape, x.dtype, x.device, w.shape, w.dtype, w.device, shape_of_bias, trains, config, tries)
        planned = self.plans.get(key)
        return key, None if planned is None else planned.get((w.stride(), w.data_ptr() % 16))

    def agree(
        self,
        key: tuple[object, ...],
        spec: OperatorSpec,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        config: OverlapConfig,
        name: str,
        problem: str | None = None,
    ) -> Planned:
        """A new plan, the same on all ranks. Communicates, unless only the number of rows is new, or how this rank's weight lies.

        key: of look_up. problem: see plan_of.

        Raises:
            ValueError: if they differ or one of them has a problem; on every rank, where it communicates. Else on those with the
                problem: the others find by their signals that these did not come.
        """
        domain, layout = self.domain, (w.stride(), w.data_ptr() % 16)
        error = problem or spec.error(x, w, bias, domain.world_size, name)
        planned = self._planned(spec, config, x, w, name, tries=bool(key[-1]) and error is None)
        known = self.plans.get(key)
        if known is not None and problem is not None:
            raise ValueError(problem)  # of a call that peers know, in which nobody asks
        if known is not None:
            return known.setdefault(layout, planned)
        problem = error or other_table(domain, config) or why_not_here(planned.plan, domain)
        operator, _, *rest = key
        any_rows = (operator, x.dim(), x.shape[-1:], *rest)
        fits = self.agreed.get(any_rows) and planned.compares and _fits(planned.request, domain)
        if fits or self.before.get(key) == planned.request:
            if problem is not None:
                raise ValueError(problem)
        else:
            prepare(domain, planned.request, problem, name, _trained(x, w))
            self.agreed.put(any_rows, True)
        return self.plans.put(key, {layout: planned})[layout]

    def knows(self, spec: OperatorSpec) -> bool:
        """Whether ranks have agreed on some call of an operator."""
        return any(operator == spec.name for operator, *_ in self.agreed)

    def refuse(self, problem: str, spec: OperatorSpec, name: str) -> NoReturn:
        """Raise ValueError(problem), for arguments of which no plan can be made, on all ranks: they are at a first call, too."""
        with self.domain.exclusively(name):
            prepare(self.domain, Request(spec.name, "arguments that do not fit", 0), problem, name)
        raise ValueError(problem)

    def _planned(
        self, spec: OperatorSpec, config: OverlapConfig, x: torch.Tensor, w: torch.Tensor, name: str, *, tries: bool
    ) -> Planned:
        """The plan by what is known now, in a trial where methods may take turns and the sizes were never measured."""
        plan = settled_plan(self.domain, spec, config, self.table, x, w)
        trains = torch.is_grad_enabled() and w.requires_grad
        planned = Planned(self.domain, plan, trains)
        if tries and config.tune_steps and trains:
            if self.topology.nodes > 1 and not self.domain.is_connected:
                # Its methods may need the network where the untuned one does not. A rank that differs would not come to connect.
                what = f"{plan.request.what}; tries methods in {config.tune_steps} calls"
                prepare(self.domain, Request(spec.name, what, 0), None, name, _trained(x, w))
            return self.trials.begun(planned, config, self.table, x, w)
        return planned

    def end_trial(self, trial: Trial, name: str) -> None:
        """The linear `name` has made the calls of a trial. Communicates. All plans are made again: the winners are also for calls
        without gradients and for frozen weights, and no two ranks may go by different tables."""
        found = self.trials.outcome(trial, self.table, name)
        self.table = replace(
            self.table, winners={**self.table.winners, **{winner.measured.bucket: winner for winner in found}}
        )
        for key in self.plans:
            for planned in (self.plans.get(key) or {}).values():  # the same request, however a rank's weight lies
                self.before.put(key, planned.request)
        self.plans.clear()
        self.trials.keep(found, trial, name)


def book_of(domain: OverlapDomain, name: str) -> PlanBook:
    """The plans of a domain. name: of the linear that asks, for errors of the group's first call."""
    book = made_book(domain)
    if book is None:
        with domain.exclusively(name):
            # Another thread may have been first.
            book = domain.book = made_book(domain) or PlanBook.of_group(domain, name)
    return book


def made_book(domain: OverlapDomain | None) -> PlanBook | None:
    """The plans of a domain, if it is made and has had a call. Does not communicate."""
    book = None if domain is None else domain.book
    assert book is None or isinstance(book, PlanBook)
    return book


def _trained(x: torch.Tensor, w: torch.Tensor) -> str:
    """Which operands get gradients, in words."""
    if not torch.is_grad_enabled():
        return "no gradients"
    return ", ".join(f"{what} {'trained' if t.requires_grad else 'frozen'}" for what, t in (("x", x), ("w", w)))


def _fits(request: Request, domain: OverlapDomain) -> bool:
    """Whether a call may use another number of rows than the ranks have agreed on: it fits into the slots that are there."""
    there = not request.shares_memory or domain.heap is not None
    fits = there and domain.layout.covering(request.slot_bytes, request.flagged_bytes) == domain.layout
    return fits and not domain.is_capturing()
