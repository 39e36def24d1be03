"""The plan of a call: a dictionary look-up, but for the first call with some shapes, and the call that ends a trial."""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.distributed as dist

from ..config import OverlapConfig
from ..planning.arguments import autocast_error
from ..planning.spec import OperatorSpec
from ..runtime.registry import domain_of, made_domain
from .in_trial import InTrial
from .plan_book import PlanBook, book_of
from .planned import Planned

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
