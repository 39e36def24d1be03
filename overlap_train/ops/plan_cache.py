"""The plans of a domain: agreed on at the first call with some shapes, then a look-up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import NoReturn

import torch
import torch.distributed as dist

from ..cache import BoundedCache
from ..config import OverlapConfig, flag_name
from ..group.domain import OverlapDomain
from ..group.memory import Request, may_hold, prepare
from ..group.registry import domain_of, made_domain
from ..group.tags import Tag
from ..planning import table, table_key
from ..planning.table import Table, Winner
from ..planning.table_key import Key
from ..planning.trial import TrialKey, is_known, key_of, methods_to_try, winners
from ..select.passes import Pass
from ..warn import warn_user
from .launch import is_interpreted
from .plan import Plan, barrier_first, make_plan, why_not, why_not_across_nodes
from .spec import OperatorSpec, autocast_error
from .trials import Timed, TimedBracket, Trial, work_of


def settled_plan(
    domain: OverlapDomain, spec: OperatorSpec, config: OverlapConfig, known: Table, x: torch.Tensor, w: torch.Tensor
) -> Plan:
    """The plan of `spec` for operands like x and w. The first one that sends between nodes connects them, which is collective,
    and measures their network: products leave it the SMs that it needs, and blocks are cut as its pace wants it."""
    plan = make_plan(spec, config, known, domain.topology, x, w)
    if not any(engine.nodes > 1 and engine.slots for engine in (plan.fprop, plan.dgrad)):
        return plan
    config = domain.span.settled(config)
    return make_plan(spec, config, known, domain.topology, x, w, network_gbs=domain.span.network_gbs)


def why_not_here(plan: Plan, domain: OverlapDomain) -> str | None:
    """Why a plan cannot run in a domain, or None."""
    interpreted = domain.device.type != "cuda" and is_interpreted()
    return why_not(plan, domain.device, interpreted) or why_not_across_nodes(plan, domain.nodes.problem)


def other_table(domain: OverlapDomain, config: OverlapConfig) -> str | None:
    """What is wrong with a call whose measurements are not those that its domain has read, or None."""
    if config.tuning_dir == domain.config.tuning_dir:
        return None
    return (
        f"tuning_dir={config.tuning_dir!r}, but the group's domain was made with {domain.config.tuning_dir!r} "
        f"({flag_name('tuning_dir')}); call shutdown() to change it"
    )


def table_key_of(domain: OverlapDomain) -> Key:
    """What measurements in a domain depend on."""
    return table_key.key_of(domain.device, domain.world_size, domain.topology.nodes, domain.config.network)


def read(domain: OverlapDomain) -> Table | None:
    """The tuning table that rank 0 finds, None on other ranks. Collective at a group's first call, which finds the nodes."""
    key = table_key_of(domain)
    return None if domain.rank else table.read(domain.config.tuning_dir, key)


def save(domain: OverlapDomain, found: Sequence[Winner]) -> str:
    """Store winners. Returns where they are, in words; a folder that cannot be written is a warning."""
    folder = domain.config.tuning_dir
    try:
        return f"kept in {table.save(folder, table_key_of(domain), found)}"
    except OSError as error:
        warn_user(f"tuning_dir={folder!r} cannot be written ({error}); name another folder")
        return "for this run only"


_MOST_NAMES = 4096  # linears of one shape
# Called with the plan of a call, and with the trial in which the linear takes part by it, or None.
OnPlan = Callable[[Plan, Trial | None], None]


@dataclass(frozen=True)
class PassTags:
    """How the passes of one linear are known to its peers (fprop, dgrad, wgrad) and to profilers (ranges)."""

    fprop: Tag
    dgrad: Tag
    wgrad: Tag
    ranges: tuple[str, str, str]


@dataclass(frozen=True)
class PlannedLinear:
    """What autograd passes from one linear's forward to its backward, as one object: torch looks at each argument of a Function.

    keeps: forward keeps what it has gathered for the weight gradient.
    """

    domain: OverlapDomain
    plan: Plan
    tags: PassTags
    keeps: bool
    _backwards: dict[tuple[bool, bool], AbstractContextManager[None]] = field(default_factory=dict)

    @cached_property
    def forward(self) -> AbstractContextManager[None]:
        """The bracket of the forward pass."""
        fprop = self.plan.fprop
        return self.domain.operator(self.tags.fprop, fprop.slots, fprop.variant.barrier_first, self.tags.ranges[0])

    def backward(self, wants_dx: bool, wants_dw: bool) -> AbstractContextManager[None]:
        """The bracket of the backward pass."""
        wanted = (wants_dx, wants_dw)
        return self._backwards.get(wanted) or self._backwards.setdefault(wanted, self._new_backward(*wanted))

    def _new_backward(self, wants_dx: bool, wants_dw: bool) -> AbstractContextManager[None]:
        plan, tags = self.plan, self.tags
        wgrad = plan.wgrad if wants_dw else None
        slots = (0 if wgrad is None else wgrad.slots) + wants_dx * plan.dgrad.slots
        begins_with_barrier = wants_dx and barrier_first(plan, wgrad is not None)
        return self.domain.operator(tags.dgrad, slots, begins_with_barrier, tags.ranges[1])


@dataclass(frozen=True)
class Planned:
    """An operator whose plan all ranks have agreed on. The plan holds for every linear of these shapes, the tags for one.

    trains: the weight gets a gradient.
    """

    domain: OverlapDomain
    plan: Plan
    trains: bool = True
    _linears: BoundedCache[tuple[str, tuple[str, ...]], PlannedLinear] = field(
        default_factory=lambda: BoundedCache(_MOST_NAMES)
    )
    _beside: dict[int, Planned] = field(default_factory=dict)  # by SMs

    @property
    def request(self) -> Request:
        """What ranks agree on."""
        return self.plan.request

    @property
    def compares(self) -> bool:
        """Whether a rank that has another number of rows is found by its signals. NCCL would not find it."""
        plan = self.plan
        return all(engine.slots or self.domain.device.type != "cuda" for engine in (plan.fprop, plan.dgrad))

    @property
    def trial(self) -> Trial | None:
        """The trial in which a linear takes part by its next call."""
        return None

    def is_due(self, name: str) -> bool:
        """Whether a trial ends before the next call of the linear `name`."""
        return False

    def linear(self, name: str, meaning: tuple[str, ...] = ()) -> PlannedLinear:
        """The linear `name`. meaning: in what else ranks must agree, beside operator, shapes and dtype."""
        key = (name, meaning)
        return self._linears.get(key) or self._linears.put(key, self._new_linear(name, meaning))

    def next_call(self, name: str) -> PlannedLinear:
        """The linear `name` in its next call: the same each time, but while methods are tried (in_trial.py)."""
        return self.linear(name)

    def beside(self, sms: int) -> Planned:
        """The same, whose kernels leave so many SMs to what another group sends meanwhile. Peers need not know."""
        if not sms:
            return self
        return self._beside.get(sms) or self._beside.setdefault(sms, self._new_beside(sms))

    def _new_beside(self, sms: int) -> Planned:
        plan = self.plan
        engines = {part: getattr(plan, part) for part in ("fprop", "dgrad", "dgrad_alone", "wgrad")}
        spared = {part: engine.beside(sms) for part, engine in engines.items() if engine is not None}
        return Planned(self.domain, replace(plan, **spared), self.trains)

    def _new_linear(self, name: str, meaning: tuple[str, ...]) -> PlannedLinear:
        keeps = self.plan.wgrad is None and self.trains
        return PlannedLinear(self.domain, self.plan, tags_of(self.plan, name, meaning), keeps)


def tags_of(plan: Plan, name: str, meaning: tuple[str, ...]) -> PassTags:
    """The tags of a linear. Methods are not in them: ranks have agreed on these already."""
    what = ", ".join([plan.spec.name, plan.request.what.partition(", method")[0], *meaning])
    short = name.rpartition(".")[2].removeprefix("linear_").removesuffix("_layer")
    fprop, dgrad, wgrad = (Tag(f"{name}/{part}", what) for part in ("fprop", "dgrad", "wgrad"))
    return PassTags(fprop, dgrad, wgrad, (f"{short}/fprop", f"{short}/dgrad", f"{short}/wgrad"))


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
    return f"{winner.method} ({', '.join(f'{method} {ms:.3f} ms' for method, ms in times)})"


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
            if self.topology.nodes > 1 and not self.domain.span.is_connected:
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


_CONFIGS = (OverlapConfig, type(None))


def plan_of(
    spec: OperatorSpec,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    config: OverlapConfig | None,
    name: str,
    *,
    tries: bool = False,
    problem: str | None = None,
) -> Planned:
    """The plan of a call, the same on all ranks of the group. x, w, bias: the operands of the linear `name`.

    A known plan is a dictionary look-up: only autocast is checked again. A new one checks the arguments and is agreed on by all
    ranks, which communicates. So does the end of a trial.

    tries: methods may take turns in it (config.tune_steps). problem: what else is wrong with the call, or None; it is raised like
    what is wrong with the operands.

    Raises:
        ValueError: something is wrong with the arguments or settings, the ranks differ, or the memory does not suffice.
        OverlapTimeoutError: a rank did not come.
        RuntimeError: see runtime/prepare.py, or another thread is in an operator of the same group.
    """
    wrong = autocast_error(name, x)
    if wrong is not None:
        raise ValueError(wrong)
    domain = made_domain(group)
    if domain is not None and isinstance(domain.book, PlanBook) and isinstance(config, _CONFIGS):
        planned = domain.book.look_up(spec, x, w, bias, config, tries)[1]
        if planned is not None and problem is None and not planned.is_due(name):
            return planned
    domain = domain_of(group, config, x.device)
    book = book_of(domain, name)
    key, planned = book.look_up(spec, x, w, bias, config, tries)
    planned = planned if problem is None else None  # which `agree` raises, also of a plan that is known
    with domain.exclusively(name):
        planned = planned or book.agree(key, spec, x, w, bias, config or domain.config, name, problem)
        if isinstance(planned, InTrial) and planned.is_due(name):  # also of a length, or a weight, that is new
            book.end_trial(planned.in_trial, name)
            planned = book.agree(key, spec, x, w, bias, config or domain.config, name)
        return planned


def refuse(
    problem: str,
    spec: OperatorSpec,
    group: dist.ProcessGroup,
    config: OverlapConfig | None,
    device: torch.device,
    name: str,
) -> NoReturn:
    """Raise ValueError(problem), for arguments of which no plan can be made: on every rank, at the operator's first call in its
    group.

    Later on this rank alone, at once: its peers may be in a call that they know, in which nobody asks. They find by their signals
    that this one does not come.
    """
    book = book_of(domain_of(group, config, device), name)
    if not book.knows(spec):
        book.refuse(problem, spec, name)
    raise ValueError(problem)
