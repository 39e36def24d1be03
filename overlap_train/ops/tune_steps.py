"""Autotuning in training: plans that take turns in a linear's first calls, begun and ended by all ranks of a domain together."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from ..config import OverlapConfig
from ..group.domain import OverlapDomain
from ..group.memory import may_hold
from ..select import table
from ..select.autotune import Autotune, methods_to_try, winners, work_of
from ..select.choose import winner_of
from ..select.method import Bucket, Pass
from ..select.table import Table, Winner
from ..select.tiles import on_hopper
from ..warn import warn_user
from .plan import fprop_of, make_plan
from .plan_cache import error_here
from .planned import Planned, Turn

RunKey = tuple[Bucket, bool]  # what linears of one run have in common; whether the Hopper kernels serve them


class AutotuneRuns:
    """The autotune runs of one domain, by what their linears have in common. None stands for a run that has ended, or was not
    needed: each is made once."""

    def __init__(self, domain: OverlapDomain) -> None:
        self._domain = domain
        self._runs: dict[RunKey, Autotune | None] = {}

    def begun(self, planned: Planned, config: OverlapConfig, known: Table, x: torch.Tensor, w: torch.Tensor) -> Planned:
        """The plan in a run, where a measurement is wanted: `auto` of a linear of which none was made. config: of the call, with
        tune_steps. x, w: its operands, in which nothing is wrong."""
        spec, domain, nodes = planned.plan.spec, self._domain, self._domain.topology.nodes
        device, fprop = domain.device, fprop_of(spec, config, domain.world_size, x, w)
        key = self._key(fprop)
        if key not in self._runs and all(winner_of(p, device, known) is not None for p in (fprop, fprop.dgrad)):
            self._runs[key] = None
        if key in self._runs and self._runs[key] is None:
            return planned
        # Each plan that can run here, if the memory that there may be holds it beside those before it and the untuned one: blocks
        # and flagged words have memory of their own, so that their needs add up. The same on all ranks.
        plans, needed = {}, planned.request
        for method in methods_to_try(fprop, device, nodes):
            plan = make_plan(spec, config.by(method), known, domain.topology, x, w)
            together = needed.covering(plan.request)
            if error_here(plan, domain) is None and may_hold(domain, together):
                plans[method], needed = plan, together
        if key not in self._runs:
            self._runs[key] = Autotune(fprop, tuple(plans), config.tune_steps, device) if len(plans) > 1 else None
        run, work, trains = self._runs[key], work_of(fprop), planned.trains
        if run is None:
            return planned
        candidates = tuple(
            Planned(domain, plans[method], trains, Turn(run, method, work)) if method in plans else planned
            for method in run.methods
        )
        return replace(planned, run=run, candidates=candidates)

    def is_under_way(self, run: Autotune) -> bool:
        """Whether a run has not ended."""
        return self._runs.get(self._key(run.fprop)) is run

    def end(self, run: Autotune, known: Table, name: str) -> list[Winner]:
        """The winners, the same on all ranks. Communicates. Rank 0 of the group stores them, for the next run; rank 0 of the job
        prints them. name: of the linear whose call ends the run."""
        domain, what = self._domain, f"{name}: tell what each method took in {run.steps} calls"
        of_all_ranks = domain.agreement.exchange(run.times(), what, kind="end of an autotune run")
        self._runs[self._key(run.fprop)] = None
        found = winners(run.fprop, of_all_ranks, known, domain.device, domain.topology.nodes)
        where = _save(domain, found) if domain.rank == 0 else ""
        if dist.get_rank() == 0:
            first = (
                f"overlap_train: {name} and linears of about its sizes ({run.fprop}), in {run.steps} calls, {where}:"
            )
            lines = [f"  {_in_words(winner, run.fprop)}" for winner in found] or ["  too few calls to tell"]
            print(first, *lines, sep="\n", file=sys.stderr, flush=True)
        return found

    def _key(self, fprop: Pass) -> RunKey:
        return fprop.bucket, on_hopper(fprop, self._domain.device)


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


def _in_words(winner: Winner, fprop: Pass) -> str:
    """ "forward fused (fused 0.412 ms, direct 0.430 ms)"."""
    direction = "forward" if winner.measured.kind == fprop.kind else "backward"
    times = sorted(winner.ms.items(), key=lambda item: item[1])
    return f"{direction} {winner.how} ({', '.join(f'{method} {ms:.3f} ms' for method, ms in times)})"
