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
from ..select.autotune import Autotune, TimedScope, methods_to_try, winners, work_of
from ..select.choose import winner_of
from ..select.method import Bucket, Pass
from ..select.table import Table, Winner
from ..select.tiles import on_hopper
from ..warn import warn_user
from .plan import make_plan
from .plan_cache import Planned, PlannedOp, Scope, error_here

RunKey = tuple[Bucket, bool]  # what linears of one run have in common; whether the Hopper kernels serve them


@dataclass(kw_only=True)
class Candidate(Planned):
    """A plan by one of the methods that take turns. work: of a call (select/autotune.py)."""

    run: Autotune
    method: str
    work: int

    def _new_op(self, name: str, meaning: tuple[str, ...]) -> PlannedOp:
        kinds = {"fprop": self.run.fprop.kind, "dgrad": self.run.fprop.dgrad.kind}

        def timed(scope: Scope, pass_: str) -> Scope:
            return TimedScope(scope, self.run, name, kinds[pass_], self.method, self.work)

        return PlannedOp(self.domain, self.plan, name, meaning, self.trains, timed)


@dataclass(kw_only=True)
class InRun(Planned):
    """The plan that `auto` would take, and those that take turns: of each method its own, or the former where the method does not
    serve these sizes. The former also runs each linear's first call, and CUDA graphs. It is not timed."""

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
        run = self.run
        if not self.domain.is_capturing():
            turn = run.next_turn(name)
            return self if turn is None else self.candidates[turn]
        if not run.is_captured and self.domain.rank == 0:  # replays are no calls, so they never end a run
            warn_user(
                f"tune_steps={run.steps}: a CUDA graph captures {name} after {run.calls[name]} calls, before the ranks have "
                f"compared its methods; the graph keeps the untuned plan; capture later (Megatron: raise "
                f"--cuda-graph-warmup-steps; a step has a call for each micro-batch), or lower {flag_name('tune_steps')}"
            )
        run.is_captured = True
        return self


class AutotuneRuns:
    """The autotune runs of one domain, by what their linears have in common. None stands for a run that has ended, or was not
    needed: each is made once."""

    def __init__(self, domain: OverlapDomain) -> None:
        self._domain = domain
        self._runs: dict[RunKey, Autotune | None] = {}

    def begun(self, planned: Planned, config: OverlapConfig, known: Table, x: torch.Tensor, w: torch.Tensor) -> Planned:
        """The plan in a run, where a measurement is wanted: `auto` of a linear of which none was made.

        config: of the call, with tune_steps. x, w: its operands, in which nothing is wrong.
        """
        spec, domain, nodes = planned.plan.spec, self._domain, self._domain.topology.nodes
        device, world, (n, k) = domain.device, domain.world_size, w.shape
        fprop = Pass(spec.fprop, spec.global_rows(x, world), n, k, x.dtype, world)
        key = self._key(fprop)
        if key not in self._runs and all(winner_of(p, device, known, nodes) is not None for p in (fprop, fprop.dgrad)):
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
            Candidate(domain, plans[method], trains, run=run, method=method, work=work) if method in plans else planned
            for method in run.methods
        )
        return InRun(domain, planned.plan, trains, run=run, candidates=candidates)

    def is_under_way(self, run: Autotune) -> bool:
        """Whether a run has not ended."""
        return self._runs.get(self._key(run.fprop)) is run

    def end(self, run: Autotune, known: Table, name: str) -> list[Winner]:
        """The winners, the same on all ranks. Communicates. Rank 0 of the group stores them, for the next run; rank 0 of the job
        prints them. name: of the linear whose call ends the run."""
        domain, what = self._domain, f"{name}: tell what each method took in {run.steps} calls"
        of_all_ranks = domain.agreement.exchange(run.times(), what, kind="end of a trial")
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
