"""The trials of one domain (trials.py): begun at the first call of a linear whose sizes nobody has measured, ended together."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..config import OverlapConfig
from ..planning.arguments import Request
from ..planning.passes import Pass
from ..planning.plan import Plan
from ..runtime.domain import OverlapDomain
from ..runtime.prepare import may_hold
from ..select.autotune import Autotune as Trial
from ..select.autotune import RunKey as TrialKey
from ..select.autotune import is_known, key_of, methods_to_try, winners, work_of
from ..select.table import Table, Winner
from .in_trial import Candidate, InTrial
from .planned import Planned
from .runs_here import why_not_here
from .settled import settled_plan
from .tuning_file import save


class TrialBook:
    """The trials of one domain, by what their linears have in common (TrialKey). None stands for a trial that has ended, or was
    not needed: each is made once."""

    def __init__(self, domain: OverlapDomain) -> None:
        self._domain = domain
        self._trials: dict[TrialKey, Trial | None] = {}

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
        return planned if trial is None else _in_trial(planned, trial, runs, work_of(fprop))

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
            if why_not_here(plan, domain) is None and may_hold(domain, together):
                admitted[method], needed = plan, together
        return admitted

    def _trial_of(self, fprop: Pass, methods: tuple[str, ...], config: OverlapConfig) -> Trial | None:
        device = self._domain.device
        key = key_of(fprop, device)
        if key not in self._trials:
            self._trials[key] = Trial(fprop, methods, config.tune_steps, device) if len(methods) > 1 else None
        return self._trials[key]

    def is_under_way(self, trial: Trial) -> bool:
        """Whether a trial has not ended."""
        return self._trials.get(key_of(trial.fprop, self._domain.device)) is trial

    def outcome(self, trial: Trial, known: Table, name: str) -> list[Winner]:
        """The winners, the same on all ranks; the trial is over. Communicates. name: of the linear whose call ends it."""
        domain = self._domain
        what = f"{name}: tell what each method took in {trial.steps} calls"
        of_all_ranks = domain.agreement.exchange(trial.times(), what, kind="end of a trial")
        self._trials[key_of(trial.fprop, domain.device)] = None
        return winners(trial.fprop, of_all_ranks, known, domain.device, domain.topology.nodes)

    def keep(self, found: Sequence[Winner], trial: Trial, name: str) -> None:
        """Rank 0 of the group stores the winners, for the next run. Rank 0 of the job prints them."""
        where = save(self._domain, found) if self._domain.rank == 0 else ""
        if dist.get_rank() == 0:
            _print(found, trial, name, where)


def _in_trial(planned: Planned, trial: Trial, plans: dict[str, Plan], work: int) -> InTrial:
    domain, trains = planned.domain, planned.trains
    candidates = tuple(
        Candidate(domain, plans[method], trains, in_trial=trial, method=method, work=work)
        if method in plans
        else planned
        for method in trial.methods
    )
    return InTrial(domain, planned.plan, trains, in_trial=trial, candidates=candidates)


def _print(found: Sequence[Winner], trial: Trial, name: str, where: str) -> None:
    first = f"overlap_train: {name} and linears of about its sizes ({trial.fprop}), in {trial.steps} calls, {where}:"
    directions = (f"  {_DIRECTIONS[winner.measured.kind == trial.fprop.kind]} {_in_words(winner)}" for winner in found)
    print(first, *(directions if found else ["  too few calls to tell"]), sep="\n", file=sys.stderr, flush=True)


_DIRECTIONS = ("backward", "forward")


def _in_words(winner: Winner) -> str:
    """ "fused (fused 0.412 ms, direct 0.430 ms)"."""
    times = sorted(winner.ms.items(), key=lambda item: item[1])
    return f"{winner.how} ({', '.join(f'{method} {ms:.3f} ms' for method, ms in times)})"
