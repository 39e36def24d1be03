"""The plan of a call: what the first call with some shapes decides, and agrees on with the other ranks, for all later ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from .arguments import Problem, all_gather_problem
from .choice import GATHER, SCATTER, Choice, Pass, choose
from .config import OverlapConfig, flag_name
from .domain import OverlapDomain
from .operators import portable
from .registry import domain_of


class Plan:
    """What the first call with some shapes decides for all later ones: the methods of forward and backward, and their names.

    A linear has one gather and one scatter: one is its fprop, the other its dgrad. What wgrad gathers goes in whole blocks, by
    the copy engine or, where the gather does, by NCCL.
    """

    def __init__(self, domain: OverlapDomain, config: OverlapConfig, problem: Problem, fprop: Pass) -> None:
        self.domain, self.config = domain, config
        self.keeps = config.gathered_input == "keep"
        first, second = (choose(config.method, p, domain.device, domain.table) for p in (fprop, fprop.dgrad))
        self.choices: tuple[Choice, Choice] = first, second  # of fprop and dgrad
        gather, scatter = (first, second) if fprop.kind == GATHER else (second, first)
        self.gather, self.scatter = gather, scatter
        self.fprop_in_step = first.way.in_step
        self.dgrad_in_step = second.way.in_step and gather.method != "collective"  # only pushes collide
        self.fprop, self.dgrad, self.wgrad = (f"{problem.demand.op}/{part}" for part in ("fprop", "dgrad", "wgrad"))
        slot = problem.demand.op.rpartition(".")[2].removeprefix("linear_").removesuffix("_layer")
        self.fprop_range, self.dgrad_range, self.wgrad_range = (
            f"{slot}/{part}" for part in ("fprop", "dgrad", "wgrad")
        )


def plan_of(
    check: Callable[..., Problem],
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    config: OverlapConfig | None,
    name: str,
) -> Plan:
    """The plan of a call, made and agreed on at the first call with these shapes; later calls look it up."""
    domain = domain_of(group, config, x.device)
    _check_autocast(name, x)
    shape_of_bias = None if bias is None else (bias.shape, bias.dtype, bias.device)
    key = (check, name, x.shape, x.dtype, w.shape, w.dtype, w.device, shape_of_bias, config)
    plan = domain.plans.get(key)
    if plan is None:
        problem = check(x, w, bias, group, name)
        n, k = w.shape[:1].numel(), w.shape[-1:].numel()  # of any shape: what is wrong with w comes from `problem`
        kind = GATHER if check is all_gather_problem else SCATTER
        fprop = Pass(kind, problem.rows, n, k, x.dtype, domain.world_size)
        plan = domain.plans[key] = _agreed_plan(domain, config or domain.config, problem, fprop)
    return plan


def _check_autocast(name: str, x: torch.Tensor) -> None:
    """Libraries follow autocast and our kernels do not, so that the method would decide the dtype."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != x.dtype:
        raise ValueError(
            f"{name}: autocast to {torch.get_autocast_dtype(kind)} is on, the input has {x.dtype}, and operators multiply in the "
            f"dtype of their input; cast input and weight, or call inside torch.autocast({kind!r}, enabled=False)"
        )


def _agreed_plan(domain: OverlapDomain, config: OverlapConfig, problem: Problem, fprop: Pass) -> Plan:
    """A new plan, the same on all ranks. Raises ValueError on all of them if they differ or a rank has a problem."""
    plan = Plan(domain, config, problem, fprop)
    # Ranks agree on what decides which chunks they send, how many calls they make and where they meet.
    gather, scatter = (choice.way.named(choice.method) for choice in (plan.gather, plan.scatter))
    how = f"method {gather} for the gather and {scatter} for the scatter, gathered_input={config.gathered_input}"
    demand = replace(problem.demand, shapes=f"{problem.demand.shapes}, {how}")
    domain.prepare(demand, problem.error or _other_table(domain, config) or _without_kernels(plan))
    return plan


def _other_table(domain: OverlapDomain, config: OverlapConfig) -> str | None:
    """What is wrong with a call whose measurements are not those that its domain has read, or None."""
    if config.tuning_dir == domain.config.tuning_dir:
        return None
    return (
        f"tuning_dir={config.tuning_dir!r}, but the group's domain was made with {domain.config.tuning_dir!r} "
        f"({flag_name('tuning_dir')}); call shutdown() to change it"
    )


def _without_kernels(plan: Plan) -> str | None:
    """What is wrong with methods whose kernels cannot run here, or None."""
    problems = (portable.why_not(choice.method, plan.domain.device) for choice in plan.choices)
    return next(filter(None, problems), None)
