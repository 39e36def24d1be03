"""A plan as calls use it: the brackets and tags of each linear, kept from its first call on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..planning.arguments import Request
from ..planning.cache import BoundedCache
from ..planning.plan import Plan, barrier_first
from ..protocol.tags import Tag
from ..runtime.domain import OverlapDomain
from ..select.autotune import Autotune as Trial

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
