"""The plans of one domain: looked up on every call, made and agreed on at the first call with some shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist

from ..config import OverlapConfig, flag_name
from ..planning import table
from ..planning.arguments import autocast_error
from ..planning.cache import BoundedCache
from ..planning.plan import Plan, barrier_first, make_plan
from ..planning.refusals import why_not, why_not_across_nodes
from ..planning.spec import OperatorSpec
from ..protocol.tags import Tag
from ..runtime.bracket import Operator
from ..runtime.domain import OverlapDomain
from ..runtime.registry import domain_of, made_domain
from . import portable

_MOST_PLANS = 1024
_MOST_NAMES = 4096  # linears of one shape
_CONFIGS = (OverlapConfig, type(None))


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
    _backwards: dict[tuple[bool, bool], Operator] = field(default_factory=dict)

    @cached_property
    def forward(self) -> Operator:
        """The bracket of the forward pass."""
        fprop = self.plan.fprop
        return self.domain.operator(self.tags.fprop, fprop.slots, fprop.variant.barrier_first, self.tags.ranges[0])

    def backward(self, wants_dx: bool, wants_dw: bool) -> Operator:
        """The bracket of the backward pass."""
        wanted = (wants_dx, wants_dw)
        return self._backwards.get(wanted) or self._backwards.setdefault(wanted, self._new_backward(*wanted))

    def _new_backward(self, wants_dx: bool, wants_dw: bool) -> Operator:
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
    _linears: BoundedCache[tuple[str, str], PlannedLinear] = field(default_factory=lambda: BoundedCache(_MOST_NAMES))

    def linear(self, name: str, meaning: str = "") -> PlannedLinear:
        """The linear `name`. meaning: in what else ranks must agree, beside operator, shapes and dtype."""
        key = (name, meaning)
        return self._linears.get(key) or self._linears.put(key, self._new_linear(name, meaning))

    def _new_linear(self, name: str, meaning: str) -> PlannedLinear:
        keeps = self.plan.wgrad is None and self.trains
        return PlannedLinear(self.domain, self.plan, _tags(self.plan, name, meaning), keeps)


class PlanBook:
    """What one domain has decided so far, and the measurements that `auto` goes by, the same on all ranks."""

    def __init__(self, domain: OverlapDomain, name: str) -> None:
        self.domain = domain
        domain.agreement.exchange(None, f"{name}: the group's first call", kind="first call of a group")
        self.topology = domain.topology
        what = f"{name}: read the tuning table before the group's first call"
        self.table = domain.agreement.exchange(self._read_table(), what, kind="tuning table")[0]
        # By what all ranks have in common; then by how this rank's weight lies in memory, which its peers need not know.
        self.plans: BoundedCache[tuple[object, ...], dict[object, Planned]] = BoundedCache(_MOST_PLANS)
        # Keys without the rows: of calls that were agreed on with some number of them.
        self.agreed: BoundedCache[tuple[object, ...], bool] = BoundedCache(_MOST_PLANS)

    def _read_table(self) -> table.Table | None:
        """What rank 0 finds; home folders differ."""
        domain = self.domain
        if domain.rank:
            return None
        return table.read(domain.config.tuning_dir, table.key_of(domain.device, domain.world_size, self.topology.nodes))

    def look_up(
        self,
        spec: OperatorSpec,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        config: OverlapConfig | None,
    ) -> tuple[tuple[object, ...], Planned | None]:
        """The key of a call, and its plan if it was agreed on."""
        trains = (x.requires_grad, w.requires_grad) if torch.is_grad_enabled() else None
        shape_of_bias = None if bias is None else (bias.shape, bias.dtype, bias.device)
        key = (spec.name, x.shape, x.dtype, x.device, w.shape, w.dtype, w.device, shape_of_bias, trains, config)
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
    ) -> Planned:
        """A new plan, the same on all ranks. Communicates, unless only the number of rows is new, or how this rank's weight lies.

        Raises:
            ValueError: if they differ or one of them has a problem; on every rank, where it communicates. Else on those with the
                problem: the others find by their signals that these did not come.
        """
        domain, layout = self.domain, (w.stride(), w.data_ptr() % 16)
        trains = torch.is_grad_enabled() and w.requires_grad
        error = spec.error(x, w, bias, domain.world_size, name)
        plan = make_plan(spec, config, self.table, self.topology, x, w)
        if any(engine.nodes > 1 and engine.slots for engine in (plan.fprop, plan.dgrad)):
            plan = make_plan(spec, domain.settled(config), self.table, self.topology, x, w)
        planned = self.plans.get(key)
        if planned is not None:
            return planned.setdefault(layout, Planned(domain, plan, trains))
        problem = error or _other_table(domain, config) or why_not(plan, domain.device, _is_interpreted(domain))
        problem = problem or why_not_across_nodes(plan, domain.nodes.problem, domain.device)
        operator, _, *rest = key
        any_rows = (operator, x.dim(), x.shape[-1:], *rest)
        if self.agreed.get(any_rows) and _needs_no_agreement(plan, domain):
            if problem is not None:
                raise ValueError(problem)
        else:
            trained = ", ".join(
                f"{what} {'trained' if t.requires_grad else 'frozen'}" for what, t in (("x", x), ("w", w))
            )
            domain.prepare(plan.request, problem, name, trained if torch.is_grad_enabled() else "no gradients")
            self.agreed.put(any_rows, True)
        return self.plans.put(key, {layout: Planned(domain, plan, trains)})[layout]


def plan_of(
    spec: OperatorSpec,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    config: OverlapConfig | None,
    name: str,
) -> Planned:
    """The plan of a call. Whatever is wrong with one whose plan is known was looked at when it was made, but for autocast."""
    wrong = autocast_error(name, x)
    if wrong is not None:
        raise ValueError(wrong)
    domain = made_domain(group)
    if domain is not None and domain.book is not None and isinstance(config, _CONFIGS):
        planned = domain.book.look_up(spec, x, w, bias, config)[1]
        if planned is not None:
            return planned
    domain = domain_of(group, config, x.device)
    book = book_of(domain, name)
    key, planned = book.look_up(spec, x, w, bias, config)
    if planned is None:
        with domain.exclusively(name):
            planned = book.agree(key, spec, x, w, bias, config or domain.config, name)
    return planned


def book_of(domain: OverlapDomain, name: str) -> PlanBook:
    """The plans of a domain. name: of the linear that asks, for errors of the group's first call."""
    if domain.book is None:
        with domain.exclusively(name):
            domain.book = PlanBook(domain, name)
    return domain.book


def _needs_no_agreement(plan: Plan, domain: OverlapDomain) -> bool:
    """Whether a call may use another number of rows than the ranks have agreed on: it fits into the slots that are there, and a
    rank that has other rows is found by its signals (NCCL would not find it)."""
    compares = all(engine.slots or domain.device.type != "cuda" for engine in (plan.fprop, plan.dgrad))
    request = plan.request
    there = not request.shares_memory or domain.heap is not None
    fits = there and domain.layout.covering(request.slot_bytes, request.flagged_bytes) == domain.layout
    return compares and fits and not domain.is_capturing()


def _tags(plan: Plan, name: str, meaning: str) -> PassTags:
    what = f"{plan.spec.name}, {plan.request.what.partition(', method')[0]}" + (meaning and f", {meaning}")
    slot = name.rpartition(".")[2].removeprefix("linear_").removesuffix("_layer")
    fprop, dgrad, wgrad = (Tag(f"{name}/{part}", what) for part in ("fprop", "dgrad", "wgrad"))
    return PassTags(fprop, dgrad, wgrad, (f"{slot}/fprop", f"{slot}/dgrad", f"{slot}/wgrad"))


def _is_interpreted(domain: OverlapDomain) -> bool:
    return domain.device.type != "cuda" and portable.is_interpreted()


def _other_table(domain: OverlapDomain, config: OverlapConfig) -> str | None:
    """What is wrong with a call whose measurements are not those that its domain has read, or None."""
    if config.tuning_dir == domain.config.tuning_dir:
        return None
    return (
        f"tuning_dir={config.tuning_dir!r}, but the group's domain was made with {domain.config.tuning_dir!r} "
        f"({flag_name('tuning_dir')}); call shutdown() to change it"
    )
