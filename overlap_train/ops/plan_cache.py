"""The plans of a domain, agreed on at a first call with some shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from ..cache import BoundedCache
from ..config import OverlapConfig
from ..group.domain import OverlapDomain
from ..group.memory import Request, holds, may_hold, prepare
from ..group.registry import DOMAIN_WIDE, domain_of
from ..select import table
from ..select.autotune import Autotune
from ..select.table import Table
from ..warn import warn_user
from .launch import is_interpreted
from .plan import Plan, error_on_device, make_plan, takes_scales
from .planned import Planned, PlannedOp
from .spec import PLAIN, PLAIN_OR_NONE, Operands, OperatorSpec, autocast_error, tensor_error

if TYPE_CHECKING:
    from .tune_steps import AutotuneRuns

_transforms = torch._C._are_functorch_transforms_active
_CONFIGS = (OverlapConfig, type(None))
_MOST_CALLS = 1024  # that are remembered
# Called with the plan of a call, and with the autotune run in which the linear takes part by it, or None.
OnPlan = Callable[[Plan, Autotune | None], None]


def error_here(plan: Plan, domain: OverlapDomain) -> str | None:
    """Why a plan cannot run in a domain, or None."""
    sharing = [engine for engine in (plan.fprop, plan.dgrad) if engine.slots]
    errors = [domain.nodes.problem or engine.error for engine in sharing]
    return error_on_device(plan, domain.device, is_interpreted) or next(filter(None, errors), None)


class PlanCache:
    """What one domain has decided so far, and the measurements that `auto` goes by, the same on all ranks.

    plans: by what all ranks have in common; then by how this rank's weight lies in memory, which its peers need not know.
    agreed: keys of calls that ranks have agreed on, with their rows, and without. They stay when an autotune run ends and plans
    are made again: a CUDA graph may take such a call, because it has run. handles: of each linear its last call, as (what may
    change from call to call, the planned call).
    """

    def __init__(self, domain: OverlapDomain, measured: Table) -> None:
        self.domain, self.table = domain, measured
        self.plans: BoundedCache[tuple[object, ...], dict[object, Planned]] = BoundedCache(_MOST_CALLS)
        self.agreed: BoundedCache[tuple[object, ...], bool] = BoundedCache(_MOST_CALLS)
        self.handles: BoundedCache[str, tuple[tuple[object, ...], PlannedOp]] = BoundedCache()
        # By the TP group of calls that exchange in this domain: what ulysses/two_groups.py found of both.
        self.nodes_with: dict[dist.ProcessGroup, tuple[int, int]] = {}

    @cached_property
    def defaults(self) -> OverlapConfig:
        """The settings of calls that bring none: the defaults, but for what all calls of the group share."""
        shared = (*DOMAIN_WIDE, "exchange_mib")
        return OverlapConfig(**{name: getattr(self.domain.config, name) for name in shared})

    @cached_property
    def runs(self) -> AutotuneRuns:
        """The autotune runs of the domain."""
        from .tune_steps import AutotuneRuns

        return AutotuneRuns(self.domain)

    def look_up(
        self, spec: OperatorSpec, operands: Operands, config: OverlapConfig | None, tries: bool
    ) -> tuple[tuple[object, ...], Planned | None]:
        """The key of a call, and its plan if it was agreed on."""
        x, w, bias = operands
        trains = (x.requires_grad, w.requires_grad) if torch.is_grad_enabled() else None
        shape_of_bias = None if bias is None else (bias.shape, bias.dtype, bias.device)
        of_w = (w.shape, w.dtype, w.device, takes_scales(config, w))
        key = (spec.name, x.shape, x.dtype, x.device, *of_w, shape_of_bias, trains, config, tries)
        planned = self.plans.get(key)
        return key, None if planned is None else planned.get((w.stride(), w.data_ptr() % 16))

    def agree(
        self, key: tuple[object, ...], spec: OperatorSpec, operands: Operands, config: OverlapConfig, name: str,
        problem: str | None = None,
    ) -> Planned:  # fmt: skip
        """A new plan, the same on all ranks. Communicates, unless only the number of rows is new, or how this rank's weight lies.

        key: of look_up. problem: see plan_of. Raises ValueError if they differ or one of them has a problem; on every rank, where
        it communicates. Else on those with the problem: the others find by their signals that these did not come.
        """
        (x, w, _), domain = operands, self.domain
        layout = (w.stride(), w.data_ptr() % 16)
        error = problem or self._error(spec, operands, config, name)
        planned = self._planned(spec, config, operands, tries=bool(key[-1]) and error is None)
        known = self.plans.get(key)
        if known is not None and problem is not None:
            raise ValueError(problem)  # of a call that peers know, in which nobody asks
        if known is not None:
            return known.setdefault(layout, planned)
        problem = error or error_here(planned.plan, domain)
        operator, _, *rest, given, tries = key
        # What is this rank's alone is not asked of others.
        if spec.sends_input:
            rest[-2] = None  # a column linear's bias, in the order of look_up
        here = (*rest, None if given is None else config.agreed, tries)
        these_rows, any_rows = (operator, x.shape, *here), (operator, x.dim(), x.shape[-1:], *here)
        other_rows = self.agreed.get(any_rows) and planned.compares and not domain.is_capturing()
        if (other_rows or self.agreed.get(these_rows)) and holds(domain, planned.request):
            if problem is not None:
                raise ValueError(problem)
        else:
            prepare(domain, planned.request, problem, name, in_words(dict(x=x.requires_grad, w=w.requires_grad)))
            if domain.on_gpu:
                with compiling_ahead(name):
                    from .rehearsal import compile_ahead

                    compile_ahead(domain, [(planned.plan, operands)])
        for agreed in (any_rows, these_rows):
            self.agreed.put(agreed, True)
        return self.plans.put(key, {layout: planned})[layout]

    def knows(self, spec: OperatorSpec) -> bool:
        """Whether ranks have agreed on some call of an operator."""
        return any(operator == spec.name for operator, *_ in self.agreed)

    def refuse(self, problem: str, spec: OperatorSpec, name: str) -> NoReturn:
        """Raise ValueError(problem), for arguments of which no plan can be made, on all ranks: they are at a first call, too."""
        with self.domain.exclusively(name):
            prepare(self.domain, Request(spec.name, "arguments that do not fit"), problem, name)
        raise ValueError(problem)

    def _error(self, spec: OperatorSpec, operands: Operands, config: OverlapConfig, name: str) -> str | None:
        """What is wrong with the arguments of a call, or None."""
        (x, w, bias), world, nodes = operands, self.domain.world_size, self.domain.topology.nodes
        error = spec.error(x, w, bias, world, name, config.fp8 not in ("off", "blockwise"))
        if error is None and config.fp8 != "off":
            return spec.fp8_error(x, w, world, nodes, name, config.fp8)
        return error

    def _planned(self, spec: OperatorSpec, config: OverlapConfig, operands: Operands, *, tries: bool) -> Planned:
        """The plan by what is known now, in an autotune run where methods may take turns and the sizes were never measured."""
        (x, w, bias), domain = operands, self.domain
        plan = make_plan(spec, config, self.table, domain.topology, x, w, partial(may_hold, domain))
        if bias is not None and not spec.sends_input:  # the same on all ranks; a column linear's is each rank's own
            plan = replace(plan, request=replace(plan.request, shapes=f"{plan.request.shapes}, bias"))
        trains = torch.is_grad_enabled() and w.requires_grad
        planned = Planned(domain, plan, trains)
        if not (tries and config.tune_steps and trains) or spec.replicated:
            return planned
        return self.runs.begun(planned, config, self.table, x, w)

    def foreseen(self, rows: int, linears: Iterable[Foreseen]) -> list[tuple[Plan, Operands]]:
        """Plans of calls with `rows` rows of all ranks, and operands like theirs; without those that would raise, and those of
        weights that TransformerEngine keeps in fp8."""
        world, found = self.domain.world_size, dict[object, tuple[Plan, Operands]]()
        for spec, w, bias, config in linears:
            key = (spec.name, w.shape, w.dtype, w.stride(), w.requires_grad, bias is None, config)
            if key in found or type(w) not in PLAIN:
                continue
            mine = rows // world if spec.sends_input and not spec.replicated else rows
            x = w.new_empty(()).expand(mine, w.shape[-1]).requires_grad_()
            plan = make_plan(spec, config, self.table, self.domain.topology, x, w, partial(may_hold, self.domain))
            if self._error(spec, (x, w, bias), config, spec.name) is None and error_here(plan, self.domain) is None:
                found[key] = plan, (x, w, bias)
        return list(found.values())

    def end_run(self, run: Autotune, name: str) -> None:
        """The linear `name` has made the calls of an autotune run. Communicates. All plans are made again: the winners are also
        for calls without gradients and for frozen weights, and no two ranks may go by different tables."""
        found = self.runs.end(run, self.table, name)
        self.table = {**self.table, **{winner.measured.bucket: winner for winner in found}}
        self.plans.clear()
        self.handles.clear()


_caches: dict[dist.ProcessGroup, PlanCache] = {}


def cache_of(domain: OverlapDomain, name: str) -> PlanCache:
    """The plans of a domain. The group's first call is collective: it finds the nodes, and rank 0 reads the measurements for all.
    name: of the linear that asks, for errors."""
    if (cache := made_cache(domain)) is not None:
        return cache
    config, what = domain.config, f"{name}: the group's first call"
    with domain.exclusively(name):
        if (cache := made_cache(domain)) is not None:  # another thread was first
            return cache
        nodes, measured = domain.find_nodes(what).topology.nodes, None
        if domain.rank == 0:
            key = table.key_of(domain.device, domain.world_size, nodes, config.network)
            measured = table.read(config.tuning_dir, key)
        measured = domain.agreement.exchange(measured, what, kind="first call of a group")[0]
        cache = _caches[domain.group] = PlanCache(domain, measured)
        domain.at_close.append(lambda: _caches.pop(domain.group, None))
        return cache


def made_cache(domain: OverlapDomain | None) -> PlanCache | None:
    """The plans of a domain, if it is made and has had a call. Does not communicate."""
    cache = None if domain is None else _caches.get(domain.group)
    return None if cache is None or cache.domain is not domain else cache


class Foreseen(NamedTuple):
    """What calls of a linear in training will be like."""

    spec: OperatorSpec
    w: torch.Tensor
    bias: torch.Tensor | None
    config: OverlapConfig


def foresee(group: dist.ProcessGroup, rows: int, linears: Iterable[Foreseen], name: str) -> None:
    """Start to compile what the linears of a model launch, in the call of one of them, `name`, with `rows` rows of all ranks. By
    itself each linear's first call starts with its own kernels, and waits for them."""
    cache = _caches[group]
    if cache.domain.on_gpu:
        with torch.enable_grad(), compiling_ahead(name):  # gradients also in a forward pass that backward recomputes
            from .rehearsal import compile_ahead

            compile_ahead(cache.domain, cache.foreseen(rows, linears))


@contextmanager
def compiling_ahead(name: str) -> Iterator[None]:
    """Around what starts to compile what calls launch. Whatever goes wrong there, launches do it: peers have agreed on the call,
    and come to it."""
    try:
        yield
    except Exception as error:
        warn_user(f"{name}: its kernels are compiled only as they are launched: {error!r}")


def op_of(
    spec: OperatorSpec, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup,
    config: OverlapConfig | None, name: str, on_plan: OnPlan | None = None,
) -> PlannedOp:  # fmt: skip
    """The planned call of the linear `name`: its handle, if nothing has changed since its last call, else by plan_of."""
    if type(x) not in PLAIN or type(w) not in PLAIN or type(bias) not in PLAIN_OR_NONE or _transforms():
        _refuse_strange(spec, x, w, bias, group, name)
    trains = (x.requires_grad, w.requires_grad) if torch.is_grad_enabled() else None
    now = (
        spec, x.shape, x.dtype, x.device, w.shape, w.dtype, w.stride(), w.data_ptr() % 16, takes_scales(config, w), trains,
        config, None if bias is None else (bias.shape, bias.dtype, bias.device),
    )  # fmt: skip
    cache = _caches.get(group)
    if cache is not None and not cache.domain.closed and not torch._C._is_any_autocast_enabled():
        handle = cache.handles.get(name)
        if handle is not None and handle[0] == now:
            if on_plan is not None:
                on_plan(handle[1].plan, None)
            return handle[1]
    planned = plan_of(spec, x, w, bias, group, config, name, tries=True)
    op = planned.next_call(name)
    if planned.run is None:
        _caches[group].handles.put(name, (now, op))
    if on_plan is not None:
        on_plan(op.plan, planned.next_run)
    return op


def plan_of(
    spec: OperatorSpec, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup,
    config: OverlapConfig | None, name: str, *, tries: bool = False, problem: str | None = None,
) -> Planned:  # fmt: skip
    """The plan of a call of the linear `name`, the same on all ranks of the group. A known plan is a dictionary look-up: only
    autocast is checked again. A new one is agreed on, which communicates. So does the end of an autotune run.

    tries: methods may take turns in it (config.tune_steps). problem: what else is wrong with the call, or None; it is raised like
    what is wrong with the operands.

    Raises:
        ValueError: something is wrong with the arguments or settings, the ranks differ, or the memory does not suffice.
        OverlapTimeoutError: a rank did not come.
        RuntimeError: see group/memory.py, or another thread is in an operator of the same group.
    """
    if type(x) not in PLAIN or type(w) not in PLAIN or type(bias) not in PLAIN_OR_NONE or _transforms():
        _refuse_strange(spec, x, w, bias, group, name)
    wrong = autocast_error(name, x)
    if wrong is not None:
        raise _told(wrong, group, name)
    operands, cache = (x, w, bias), _caches.get(group)
    if cache is not None and not cache.domain.closed and isinstance(config, _CONFIGS):
        planned = cache.look_up(spec, operands, config, tries)[1]
        if planned is not None and problem is None and not planned.is_due(name):
            return planned
    domain = domain_of(group, config, x.device)
    cache = cache_of(domain, name)
    key, planned = cache.look_up(spec, operands, config, tries)
    planned = planned if problem is None else None  # which `agree` raises, also of a plan that is known
    with domain.exclusively(name):
        planned = planned or cache.agree(key, spec, operands, config or cache.defaults, name, problem)
        if planned.is_due(name) and planned.next_run is not None:  # also of a length, or a weight, that is new
            cache.end_run(planned.next_run, name)
            planned = cache.agree(key, spec, operands, config or cache.defaults, name)
        return planned


def _refuse_strange(
    spec: OperatorSpec, x: object, w: object, bias: object, group: dist.ProcessGroup, name: str
) -> None:
    """Raise ValueError for operands that no operator can send, among those that are no plain tensors."""
    operands = {spec.x_name: x, spec.w_name: w} | ({} if bias is None else {"bias": bias})
    wrong = tensor_error(name, operands)
    if wrong is not None:
        raise _told(wrong, group, name)


def _told(problem: str, group: dist.ProcessGroup, name: str) -> ValueError:
    """An error of this rank before ranks agree, of which its peers hear, unless the group has not made a call yet."""
    error, cache = ValueError(problem), _caches.get(group)
    if cache is not None and not cache.domain.closed:
        cache.domain.fault.tell(error, name, begun=False)
    return error


def refuse(
    problem: str, spec: OperatorSpec, group: dist.ProcessGroup, config: OverlapConfig | None, device: torch.device, name: str,
) -> NoReturn:  # fmt: skip
    """Raise ValueError(problem), for arguments of which no plan can be made: on every rank, at the operator's first call in its
    group. Later on this rank alone, at once: its peers may be in a call that they know, in which nobody asks. They find by their
    signals that this one does not come."""
    cache = cache_of(domain_of(group, config, device), name)
    if not cache.knows(spec):
        cache.refuse(problem, spec, name)
    raise ValueError(problem)


def in_words(trained: dict[str, bool]) -> str:
    """Which operands get gradients."""
    if not torch.is_grad_enabled():
        return "no gradients"
    return ", ".join(f"{what} {'trained' if is_so else 'frozen'}" for what, is_so in trained.items())
