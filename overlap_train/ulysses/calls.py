"""Calls of Ulysses' linears as planned, where weights are whole: the parts in which they run, and the plan of each part.

All parts of a call run by one method. Where methods take turns, the first part asks which one (ops/autotune.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from ..config import OverlapConfig
from ..group.registry import domain_of
from ..ops.autotune import InRun
from ..ops.plan_cache import OnPlan, Planned, plan_of, refuse
from ..ops.spec import ALL_TO_ALL_LINEAR, LINEAR_ALL_TO_ALL, OperatorSpec
from .exchange import Linear, Turn
from .layout import AttentionHeads
from .parts import Part, cut_exchange


class Terms(NamedTuple):
    """What the caller says about a call. meaning: in what else ranks must agree, in words, as part of the call's tags. on_plan:
    of parts it is told that of the first."""

    config: OverlapConfig | None
    name: str
    meaning: tuple[str, ...] = ()
    on_plan: OnPlan | None = None

    def also(self, meaning: str) -> Terms:
        """These terms, in which ranks must agree on one thing more."""
        return self._replace(meaning=(*self.meaning, meaning))

    def in_parts(self, positions: int) -> Terms:
        """Shards of other lengths may have equal parts, and more of them, which must not pair up."""
        return self.also(f"a part of {positions} positions a rank")


def heads_linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, heads: AttentionHeads | None,
    group: dist.ProcessGroup, terms: Terms,
) -> tuple[Linear, torch.Tensor | None]:  # fmt: skip
    """A call of linear_all_to_all as planned, and the bias of this rank's columns."""
    domain, copies, w_sent, bias_sent = domain_of(group, terms.config, x.device), None, w, bias
    if heads is not None:
        wrong = weight_error(heads, w, bias, domain.world_size, terms.name)
        if wrong is not None:
            refuse(wrong, LINEAR_ALL_TO_ALL, group, terms.config, x.device, terms.name)
        copies, terms = heads.sent_rows(domain.world_size, w.device), terms.also(heads.meaning)
    if copies is not None:
        # At each call: nothing tells when a weight has changed. Optimizers write into buffers that parameters are views of.
        w_sent = w.detach().index_select(0, copies).requires_grad_(w.requires_grad)
        bias_sent = None if bias is None else bias[copies]
    # For one row of all ranks' shards a rank receives W rows of N' / W features.
    row_bytes = w_sent.shape[:1].numel() * x.element_size()
    parts, turn = _parts(LINEAR_ALL_TO_ALL, x, w_sent, bias_sent, group, terms, 1, row_bytes)
    own_bias = None if bias_sent is None else bias_sent.chunk(domain.world_size)[domain.rank]
    return Linear(parts, w, w_sent.detach(), copies, rows_of_position(x), turn), own_bias


def rows_linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup, terms: Terms
) -> Linear:
    """A call of all_to_all_linear as planned."""
    world = domain_of(group, terms.config, x.device).world_size
    shards = world if x.dim() > 1 and x.shape[0] % world == 0 else 1  # plan_of refuses the rest
    # For one row of all ranks' shards a rank receives a row of K features.
    row_bytes = world * x.shape[-1:].numel() * x.element_size()
    parts, turn = _parts(ALL_TO_ALL_LINEAR, x, w, bias, group, terms, shards, row_bytes)
    return Linear(parts, w, w.detach(), None, rows_of_position(x), turn)


def _parts(
    spec: OperatorSpec, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup,
    terms: Terms, shards: int, row_bytes: int,
) -> tuple[tuple[Part, ...], Turn | None]:  # fmt: skip
    """The parts of x [shards * positions, ..., C] with the plan of each, and whose turn it is. row_bytes: see cut_exchange."""
    config, name = terms.config, terms.name
    settings = config or domain_of(group, None, x.device).config

    def plan(x: torch.Tensor, config: OverlapConfig | None, tries: bool = False) -> Planned:
        return plan_of(spec, x, w, bias, group, config, name, tries=tries)

    positions, batch = x.shape[:1].numel() // shards, x.shape[1:-1].numel()
    if x.dim() < 2 or not row_bytes or not positions or not batch:
        plan(x, config)  # which raises, on every rank: there is nothing to cut
    places = cut_exchange(positions, batch, row_bytes, settings)
    if len(places) > 1:
        terms = terms.in_parts(positions)
    # Of a part as many rows as it has: any will do.
    operands = [x[: (last - first) * shards] if len(places) > 1 else x for first, last in places]
    turn = run = None
    if settings.tune_steps:
        planned = plan(operands[0], config, tries=True)
        run, method = planned.trial, planned.next_method(name) if isinstance(planned, InRun) else None
        if isinstance(planned, InRun) and method is not None:
            turn, config = Turn(planned.run, name, method), settings.by(method)
    parts = tuple(
        Part(*place, plan(operand, config).linear(name, terms.meaning))
        for place, operand in zip(places, operands, strict=True)
    )
    if terms.on_plan is not None:
        terms.on_plan(parts[0].exchange.plan, run)
    return parts, turn


def weight_error(
    heads: AttentionHeads, w: torch.Tensor, bias: torch.Tensor | None, world_size: int, name: str
) -> str | None:
    """Why `heads` do not fit w, bias or the ranks, or None."""
    wrong = heads.error(world_size, name)
    if wrong is not None:
        return wrong
    if w.shape[:1] != (heads.features,):
        rows = f"{w.shape[:1].numel()} rows (shape {tuple(w.shape)})"
        return f"{name}: w has {rows}, {heads} needs {heads.features}; they must be equal"
    if bias is not None and bias.shape != (heads.features,):
        return f"{name}: bias has shape {tuple(bias.shape)}; it must be [{heads.features}], one per row of w"
    return None


def rows_of_position(x: torch.Tensor) -> int:
    """Rows of one position of x [positions, ..., C]."""
    return 1 if x.dim() == 2 else max(1, x.shape[1:-1].numel())


def like(x: torch.Tensor, positions: int, features: int) -> torch.Tensor:
    """A tensor [positions, b, features] for plans, in kind as x [*, b, *], that takes the memory of one element."""
    one = x.new_empty(1, 1, 1).expand(positions, x.shape[1], features)
    return one.requires_grad_() if x.requires_grad and torch.is_grad_enabled() else one
