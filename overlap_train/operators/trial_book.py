"""The trials of one domain (trials.py): begun at the first call of a linear whose sizes nobody has measured, ended together."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from ..config import OverlapConfig
from ..planning import table
from ..planning.passes import Bucket, Pass
from ..planning.plan import make_plan
from ..planning.schedule import GATHER, SCATTER
from ..planning.table import Table, Winner
from ..planning.trial import is_known, methods_to_try, winners
from ..runtime.domain import OverlapDomain
from . import portable
from .planned import Planned
from .trials import Candidate, InTrial, Trial


class TrialBook:
    """By the bucket of their forward pass; None where one has ended: each is made once."""

    def __init__(self, domain: OverlapDomain) -> None:
        self._domain = domain
        self._trials: dict[Bucket, Trial | None] = {}

    def begun(self, planned: Planned, config: OverlapConfig, known: Table, x: torch.Tensor, w: torch.Tensor) -> Planned:
        """The plan in a trial, where a measurement is wanted: `auto` of a linear of tensor parallelism that none was made of.

        config: of the call, with tune_steps. x, w: its operands, in which nothing is wrong.
        """
        spec, domain = planned.plan.spec, self._domain
        if config.method != "auto" or spec.fprop not in (GATHER, SCATTER):
            return planned
        rows, topology = spec.global_rows(x, domain.world_size), domain.topology
        n, k = w.shape
        fprop = Pass(spec.fprop, rows, n, k, x.dtype, domain.world_size)
        trial = self._trial_of(fprop, config, known)
        if trial is None:
            return planned
        plans = [make_plan(spec, replace(config, method=method), known, topology, x, w) for method in trial.methods]
        candidates = tuple(
            Candidate(domain, plan, planned.trains, in_trial=trial, method=method, rows=rows)
            for plan, method in zip(plans, trial.methods, strict=True)
        )
        return InTrial(domain, planned.plan, planned.trains, in_trial=trial, candidates=candidates)

    def _trial_of(self, fprop: Pass, config: OverlapConfig, known: Table) -> Trial | None:
        domain = self._domain
        if fprop.bucket not in self._trials:
            interpreted = domain.device.type != "cuda" and portable.is_interpreted()
            methods = methods_to_try(fprop, domain.device, interpreted, domain.topology.nodes)
            measured = is_known(fprop, known) or len(methods) < 2
            trial = None if measured else Trial(fprop, methods, config.tune_steps, domain.device)
            self._trials[fprop.bucket] = trial
        return self._trials[fprop.bucket]

    def under_way(self, fprop: Pass) -> Trial | None:
        """The trial in which a forward pass of these sizes takes part."""
        return self._trials.get(fprop.bucket)

    def ended(self, planned: Planned, known: Table, name: str) -> tuple[Trial, Table]:
        """The trial of a plan, and the table with its winners, the same on all ranks. Communicates. Rank 0 of the group keeps the
        winners, and prints them if it is that of the job: all data-parallel replicas measure alike."""
        trial, domain = planned.trial, self._domain
        assert trial is not None
        self._trials[trial.fprop.bucket] = None
        what = f"{name}: tell what each method took in {trial.steps} calls"
        of_all_ranks = domain.agreement.exchange(trial.times(), what, kind="end of a trial")
        found = winners(trial.fprop, of_all_ranks, known, domain.device)
        where = self._kept(found) if domain.rank == 0 else ""
        if dist.get_rank() == 0:
            _print(found, trial, name, where)
        return trial, replace(known, winners={**known.winners, **{winner.measured.bucket: winner for winner in found}})

    def _kept(self, found: Sequence[Winner]) -> str:
        """Where rank 0 has stored them, in words."""
        domain = self._domain
        key = table.key_of(domain.device, domain.world_size, domain.topology.nodes)
        try:
            return f"kept in {table.save(domain.config.tuning_dir, key, found)}"
        except OSError as error:
            warnings.warn(
                f"tuning_dir={domain.config.tuning_dir!r} cannot be written ({error}); name another folder",
                stacklevel=2,
            )
            return "for this run only"


def _print(found: Sequence[Winner], trial: Trial, name: str, where: str) -> None:
    said = "; ".join(f"{_DIRECTIONS[winner.measured.kind == trial.fprop.kind]} {_in_words(winner)}" for winner in found)
    print(
        f"overlap_train: {name} and linears of about its sizes ({trial.fprop}): {said or 'too few calls to tell'}; in "
        f"{trial.steps} calls, {where}",
        file=sys.stderr,
        flush=True,
    )


_DIRECTIONS = ("backward", "forward")


def _in_words(winner: Winner) -> str:
    """ "fused (fused 0.412 ms, direct 0.430)"."""
    times = sorted(winner.ms.items(), key=lambda item: item[1])
    return f"{winner.method} ({', '.join(f'{method} {ms:.3f} ms' for method, ms in times)})"
