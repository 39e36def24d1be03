"""Autotuning in training: plans that take turns in a linear's first calls, begun and ended by all ranks of a domain together."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
import torch.distributed as dist

from ..config import OverlapConfig, flag_name
from ..group.domain import OverlapDomain
from ..group.memory import Request, may_hold
from ..select import table
from ..select.autotune import Autotune, RunKey, Timed, TimedBracket, is_known, key_of, methods_to_try, winners, work_of
from ..select.passes import Pass
from ..select.table import Table, Winner
from ..warn import warn_user
from .plan import Plan
from .plan_cache import Planned, PlannedOp, Scope, error_here, settled_plan


@dataclass(kw_only=True)
class Candidate(Planned):
    """A plan by one of the methods that take turns. work: of a call (select/autotune.py)."""

    run: Autotune
    method: str
    work: int

    def _new_op(self, name: str, meaning: tuple[str, ...]) -> PlannedOp:
        kinds = {"fprop": self.run.fprop.kind, "dgrad": self.run.fprop.dgrad.kind}

        def timed(scope: Scope, pass_: str) -> Scope:
            return TimedBracket(scope, self.run, Timed(name, kinds[pass_], self.method, self.work))

        return PlannedOp(self.domain, self.plan, name, meaning, self.trains, timed)


@dataclass(kw_only=True)
class InRun(Planned):
    """The plan that `auto` would take, and those that take turns. The former runs each linear's first call, CUDA graphs, and the
    turns of methods that do not serve these sizes. It is not timed."""

    run: Autotune
    candidates: tuple[Planned, ...]

    @property
    def request(self) -> Request:
        """The Request that covers all candidates. It names the methods."""
        run, requests = self.run, (candidate.plan.request for candidate in self.candidates)
        needed = reduce(Request.covering, requests, self.plan.request)
        return replace(needed, how=f"{needed.how}; tries {', '.join(run.methods)} in {run.steps} calls")

    @property
    def compares(self) -> bool:
        """False: signals do not find a rank that has another number of rows in `collective`, which always takes its turn."""
        return False

    @property
    def trial(self) -> Autotune | None:
        """The run; None in a CUDA graph, which keeps its plan whatever the run finds."""
        return None if self.domain.is_capturing() else self.run

    def is_due(self, name: str) -> bool:
        """Whether the run ends before the next call of the linear `name`. Never in a CUDA graph, where ranks cannot tell each
        other anything."""
        return self.run.is_due(name) and not self.domain.is_capturing()

    def next_call(self, name: str) -> PlannedOp:
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
        turn = self.run.next_turn(name)
        return self if turn is None else self.candidates[turn]

    def _note_capture(self, name: str) -> None:
        """Replays are no calls, so they never end a run: rank 0 of the group says it once."""
        run = self.run
        if not run.captured and self.domain.rank == 0:
            warn_user(
                f"tune_steps={run.steps}: a CUDA graph captures {name} after {run.calls(name)} calls, before the ranks have "
                f"compared its methods; the graph keeps the untuned plan; capture later (Megatron: raise "
                f"--cuda-graph-warmup-steps; a step has a call for each micro-batch), or lower {flag_name('tune_steps')}"
            )
        run.captured.add(name)


def _candidates(planned: Planned, run: Autotune, plans: dict[str, Plan], work: int) -> tuple[Planned, ...]:
    """In turn, of each method: its plan, or the untuned one where the method does not serve these sizes."""
    domain, trains = planned.domain, planned.trains
    return tuple(
        Candidate(domain, plans[method], trains, run=run, method=method, work=work) if method in plans else planned
        for method in run.methods
    )


class AutotuneRuns:
    """The autotune runs of one domain, by what their linears have in common (RunKey). None stands for a run that has ended, or
    was not needed: each is made once."""

    def __init__(self, domain: OverlapDomain) -> None:
        self._domain = domain
        self._trials: dict[RunKey, Autotune | None] = {}

    def begun(self, planned: Planned, config: OverlapConfig, known: Table, x: torch.Tensor, w: torch.Tensor) -> Planned:
        """The plan in a trial, where a measurement is wanted: `auto` of a linear of which none was made.

        config: of the call, with tune_steps. x, w: its operands, in which nothing is wrong.
        """
        spec, domain = planned.plan.spec, self._domain
        n, k = w.shape
        fprop = Pass(spec.fprop, spec.global_rows(x, domain.world_size), n, k, x.dtype, domain.world_size)
        if self._is_over(fprop, known):
            return planned
        plans = {
            method: settled_plan(domain, spec, config.by(method), known, x, w)
            for method in methods_to_try(fprop, domain.device, domain.topology.nodes)
        }
        runs = self._admitted(plans, planned.request)
        trial = self._trial_of(fprop, tuple(runs), config)
        return (
            planned
            if trial is None
            else InRun(
                domain,
                planned.plan,
                planned.trains,
                run=trial,
                candidates=_candidates(planned, trial, runs, work_of(fprop)),
            )
        )

    def _is_over(self, fprop: Pass, known: Table) -> bool:
        """Whether a trial of these sizes has ended, or is not needed. Asked before nodes are connected for it."""
        domain, key = self._domain, key_of(fprop, self._domain.device)
        if key not in self._trials and is_known(fprop, known, domain.device, domain.topology.nodes):
            self._trials[key] = None
        return key in self._trials and self._trials[key] is None

    def _admitted(self, plans: dict[str, Plan], untuned: Request) -> dict[str, Plan]:
        """The plans that can run here, each if the memory that there may be holds it beside those before it and the untuned one:
        blocks and flagged words have memory of their own, so that their needs add up. The same on all ranks."""
        domain = self._domain
        admitted, needed = {}, untuned
        for method, plan in plans.items():
            together = needed.covering(plan.request)
            if error_here(plan, domain) is None and may_hold(domain, together):
                admitted[method], needed = plan, together
        return admitted

    def _trial_of(self, fprop: Pass, methods: tuple[str, ...], config: OverlapConfig) -> Autotune | None:
        device = self._domain.device
        key = key_of(fprop, device)
        if key not in self._trials:
            self._trials[key] = Autotune(fprop, methods, config.tune_steps, device) if len(methods) > 1 else None
        return self._trials[key]

    def is_under_way(self, trial: Autotune) -> bool:
        """Whether a trial has not ended."""
        return self._trials.get(key_of(trial.fprop, self._domain.device)) is trial

    def outcome(self, trial: Autotune, known: Table, name: str) -> list[Winner]:
        """The winners, the same on all ranks; the trial is over. Communicates. name: of the linear whose call ends it."""
        domain = self._domain
        what = f"{name}: tell what each method took in {trial.steps} calls"
        of_all_ranks = domain.agreement.exchange(trial.times(), what, kind="end of a trial")
        self._trials[key_of(trial.fprop, domain.device)] = None
        return winners(trial.fprop, of_all_ranks, known, domain.device, domain.topology.nodes)

    def keep(self, found: Sequence[Winner], trial: Autotune, name: str) -> None:
        """Rank 0 of the group stores the winners, for the next run. Rank 0 of the job prints them."""
        where = _save(self._domain, found) if self._domain.rank == 0 else ""
        if dist.get_rank() == 0:
            _print(found, trial, name, where)


def _save(domain: OverlapDomain, found: Sequence[Winner]) -> str:
    """Store winners, on rank 0 for all: home folders differ. Returns where they are, in words; a folder that cannot be written is
    a warning."""
    folder = domain.config.tuning_dir
    key = table.key_of(domain.device, domain.world_size, domain.topology.nodes, domain.config.network)
    try:
        return f"kept in {table.save(folder, key, found)}"
    except OSError as error:
        warn_user(f"tuning_dir={folder!r} cannot be written ({error}); name another folder")
        return "for this run only"


def _print(found: Sequence[Winner], trial: Autotune, name: str, where: str) -> None:
    first = f"overlap_train: {name} and linears of about its sizes ({trial.fprop}), in {trial.steps} calls, {where}:"
    directions = (f"  {_DIRECTIONS[winner.measured.kind == trial.fprop.kind]} {_in_words(winner)}" for winner in found)
    print(first, *(directions if found else ["  too few calls to tell"]), sep="\n", file=sys.stderr, flush=True)


_DIRECTIONS = ("backward", "forward")


def _in_words(winner: Winner) -> str:
    """ "fused (fused 0.412 ms, direct 0.430 ms)"."""
    times = sorted(winner.ms.items(), key=lambda item: item[1])
    return f"{winner.how} ({', '.join(f'{method} {ms:.3f} ms' for method, ms in times)})"
