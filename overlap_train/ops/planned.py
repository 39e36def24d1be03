"""The handle that a linear keeps to its planned call, and the plan of all linears of its sizes, also while methods take turns."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import NamedTuple

import torch

from ..cache import BoundedCache
from ..config import flag_name
from ..group.domain import OverlapDomain
from ..group.memory import Request
from ..group.signals import Tag
from ..select.autotune import Autotune, TimedScope
from ..warn import warn_user
from .plan import Plan

Scope = AbstractContextManager[None]


class Ranges(NamedTuple):
    """What profilers call the passes of one linear. gather: of an all-reduce's sums."""

    fprop: str
    dgrad: str
    wgrad: str
    gather: str


class PassTags(NamedTuple):
    """How the passes of one linear are known to its peers (fprop, dgrad, wgrad) and to profilers (ranges). wgrad: of the gather
    for it, or of that of an all-reduce's sums."""

    fprop: Tag
    dgrad: Tag
    wgrad: Tag
    ranges: Ranges


class Turn(NamedTuple):
    """A method of an autotune run, by which calls are timed. work: of a call (select/autotune.py)."""

    run: Autotune
    method: str
    work: int


class _BackwardScopes(dict[tuple[bool, bool], Scope]):
    """The scope of a backward pass by (wants dx, wants dw), made at its first use."""

    def __init__(self, op: PlannedOp) -> None:
        super().__init__()
        self._op = op

    def __missing__(self, wanted: tuple[bool, bool]) -> Scope:
        (wants_dx, wants_dw), plan, tags = wanted, self._op.plan, self._op.tags
        wgrad = plan.wgrad if wants_dw else None
        slots = (0 if wgrad is None else wgrad.slots) + wants_dx * plan.dgrad.slots
        slots = max(slots, plan.slots_of_amax * plan.dgrad.kind.receives)
        gathers = wgrad is not None or not plan.spec.sends_input
        begins_with_barrier = wants_dx and plan.dgrad.variant.barrier_first and gathers
        scope: Scope = self._op.domain.operator(tags.dgrad, slots, begins_with_barrier, tags.ranges.dgrad)
        return self.setdefault(wanted, self._op.timed(scope, tags.dgrad) if wants_dx else scope)


class PlannedOp:
    """The planned call of one linear, its handle: the plan, which holds for all linears of these shapes, its own tags and scopes.

    Autograd passes it from forward to backward. keeps: forward keeps what it has gathered for the weight gradient. forward: the
    scope of the forward pass. backward: those of backward passes, by (wants dx, wants dw). gather: that of the gather of an
    all-reduce's sums. turn: by which passes are timed.
    """

    def __init__(
        self, domain: OverlapDomain, plan: Plan, name: str, meaning: tuple[str, ...], trains: bool,
        turn: Turn | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(name, str):
            raise ValueError(f"name={name!r} must be a str, by which ranks recognise each other's calls, or left out")
        self.domain, self.plan, self.keeps = domain, plan, plan.wgrad is None and trains
        self._name, self.turn = name, turn
        # Methods are not in the tags: ranks have agreed on these already.
        what = ", ".join([plan.spec.name, plan.request.shapes, *meaning])
        short = name.rpartition(".")[2].removeprefix("linear_").removesuffix("_layer")
        ranges = Ranges(*(f"{short}/{pass_}" for pass_ in Ranges._fields))
        last = "wgrad" if plan.gather is None else "gather"
        fprop, dgrad, wgrad = (Tag(f"{name}/{pass_}", what) for pass_ in ("fprop", "dgrad", last))
        self.tags = PassTags(fprop, dgrad, wgrad, ranges)
        slots = max(plan.fprop.slots, plan.slots_of_amax * plan.fprop.kind.receives)
        forward = domain.operator(fprop, slots, plan.fprop.variant.barrier_first, ranges.fprop)
        self.forward = self.timed(forward, fprop)
        self.backward = _BackwardScopes(self)
        if plan.gather is not None:
            self.gather = domain.operator(wgrad, plan.gather.slots, shown_as=ranges.gather)
        self._amax = Tag(f"{name}/amax", what)
        for tag in (dgrad, wgrad, self._amax):
            domain.fault.register(tag)

    def of_all_ranks(self, amax: torch.Tensor) -> torch.Tensor:
        """amax [parts] of every rank -> [W x parts]. Inside of the scope of a pass that gathers what these scale."""
        assert self.plan.amax is not None
        whole: torch.Tensor = self.plan.amax.start(self.domain, self._amax, amax.view(1, -1)).gathered_copy()
        if self.plan.slots_of_amax:
            self.domain.workspace.receive_first()
        return whole.view(-1)

    def timed(self, scope: Scope, tag: Tag) -> Scope:
        """The scope of a pass, timed in an autotune run. tag: of the pass."""
        if self.turn is None:
            return scope
        run, method, work = self.turn
        kind = run.fprop.kind if tag is self.tags.fprop else run.fprop.dgrad.kind
        return TimedScope(scope, run, self._name, kind, method, work)


@dataclass
class Planned:
    """A plan that all ranks have agreed on, and the linears that run by it. trains: the weight gets a gradient. turn: of a plan
    of one of the methods of an autotune run.

    run, candidates: of the plan that `auto` would take, while methods take turns. Of each method it is its own plan, or the one
    that `auto` would take where the method does not serve these sizes. That one also runs each linear's first call, and CUDA
    graphs. It is not timed.
    """

    domain: OverlapDomain
    plan: Plan
    trains: bool = True
    turn: Turn | None = None
    run: Autotune | None = None
    candidates: tuple[Planned, ...] = ()
    _ops: BoundedCache[tuple[str, tuple[str, ...]], PlannedOp] = field(default_factory=BoundedCache)
    _concurrent: dict[int, Planned] = field(default_factory=dict)  # by SMs

    @property
    def request(self) -> Request:
        """What ranks compare: of a run the request that covers all candidates. It names the methods."""
        if self.run is None:
            return self.plan.request
        needed = reduce(Request.covering, (one.plan.request for one in self.candidates), self.plan.request)
        tries = f"tries {', '.join(self.run.methods)} in {self.run.steps} calls"
        return replace(needed, how=f"{needed.how}; {tries}")

    @property
    def compares(self) -> bool:
        """Whether a rank that has another number of rows is found by its signals. NCCL would not find it, and `collective` always
        takes its turn."""
        engines = (self.plan.fprop, self.plan.dgrad)
        return self.run is None and all(engine.slots or not self.domain.on_gpu for engine in engines)

    @property
    def next_run(self) -> Autotune | None:
        """The autotune run in which a linear takes part by its next call. None in a CUDA graph, where ranks cannot tell each
        other anything: it keeps its plan whatever the run finds."""
        return None if self.run is None or self.domain.is_capturing() else self.run

    def is_due(self, name: str) -> bool:
        """Whether an autotune run ends before the next call of the linear `name`."""
        return self.run is not None and self.run.is_due(name) and not self.domain.is_capturing()

    def linear(self, name: str, meaning: tuple[str, ...] = ()) -> PlannedOp:
        """The linear `name`. meaning: in what else ranks must agree, beside operator, shapes and dtype."""
        key = (name, meaning)
        return self._ops.get(key) or self._ops.put(
            key, PlannedOp(self.domain, self.plan, name, meaning, self.trains, self.turn)
        )

    def next_call(self, name: str) -> PlannedOp:
        """The linear `name` in its next call: in a run by the method whose turn it is."""
        return self._next(self.run, name).linear(name) if self.run is not None else self.linear(name)

    def next_method(self, name: str) -> str | None:
        """The method by which the linear `name` is to run in its next call, for callers that make it of several plans; None where
        the plan that `auto` would take has it."""
        turn = None if self.run is None else self._next(self.run, name).turn
        return None if turn is None else turn.method

    def _next(self, run: Autotune, name: str) -> Planned:
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

    def beside(self, sms: int) -> Planned:
        """The same, whose kernels leave so many SMs to what another group sends meanwhile. Peers need not know."""
        if not sms:
            return self
        if sms not in self._concurrent:
            engines = {part: getattr(self.plan, part) for part in ("fprop", "dgrad", "dgrad_alone", "wgrad")}
            spared = {part: engine and replace(engine, concurrent_sms=sms) for part, engine in engines.items()}
            self._concurrent[sms] = Planned(self.domain, replace(self.plan, **spared), self.trains)
        return self._concurrent[sms]
