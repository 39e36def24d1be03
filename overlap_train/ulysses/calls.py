"""Calls of Ulysses' linears as planned: what is wrong with them, in which parts they run, and the plan of each part.

All parts of a call run by one method. Where methods take turns, the first part asks which one (ops/autotune.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..config import OverlapConfig
from ..group.domain import OverlapDomain
from ..group.registry import domain_of
from ..ops.autotune import InRun
from ..ops.plan_cache import OnPlan, Planned, plan_of, refuse
from ..ops.spec import ALL_TO_ALL_LINEAR, LINEAR_ALL_TO_ALL, OperatorSpec
from ..select.autotune import Autotune
from .attention_layout import QkNorm, Rotary
from .exchange import Linear, TimedLinear
from .layout import AttentionHeads, SequenceLayout
from .parts import Part, cut_exchange


def sequence_error(
    x: torch.Tensor, rows: int, layout: SequenceLayout, rotary: Rotary | None, world_size: int, name: str
) -> str | None:
    """What is wrong with x and what goes with its rows, or None. rows: of the whole sequence, unless layout has lengths."""
    if not isinstance(layout, SequenceLayout):
        return f"{name}: layout={layout!r} must be a SequenceLayout, such as SequenceLayout('zigzag')"
    if not isinstance(rotary, Rotary | None):
        return f"{name}: rotary is a {type(rotary).__name__}; it must be Rotary(cos, sin), or None"
    if x.dim() != 3:
        return f"{name}: the input has shape {tuple(x.shape)}; it must be [sequence, batch, features]"
    rows = sum(layout.lengths) or rows
    if rotary is not None and (rotary.cos.shape != rotary.sin.shape or rotary.cos.shape[:-1].numel() != rows):
        shapes = f"cos {tuple(rotary.cos.shape)} and sin {tuple(rotary.sin.shape)}"
        return f"{name}: rotary has {shapes}; both must have a row for each of the {rows} rows of all ranks"
    if rotary is not None and (rotary.cos.device != x.device or rotary.sin.device != x.device):
        where = f"cos on {rotary.cos.device} and sin on {rotary.sin.device}"
        return f"{name}: rotary has {where}, the input is on {x.device}; move them there"
    return layout.error(rows, world_size, name)


def lengths_error(x: torch.Tensor, layout: SequenceLayout, rank: int | None, shards: int, name: str) -> str | None:
    """Why x does not have as many rows as layout.lengths says, or None. rank: whose rows they are, of which x has one of `shards`
    equal parts; None: of the whole sequence."""
    if not layout.lengths:
        return None
    if any(length % shards for length in layout.lengths):
        return (
            f"{name}: layout.lengths={layout.lengths} must be divisible by the {shards} ranks of tp_group, which have equal "
            f"parts of a rank's rows"
        )
    expected = sum(layout.lengths) if rank is None else layout.lengths[rank] // shards
    if x.shape[0] == expected:
        return None
    whose = "all ranks together have" if rank is None else f"rank {rank} has"
    return f"{name}: the input has shape {tuple(x.shape)}; by layout.lengths={layout.lengths} {whose} {expected} rows in it"


def heads_error(
    x: torch.Tensor, heads: AttentionHeads, qk_norm: QkNorm | None, rotary: Rotary | None, name: str
) -> str | None:
    """What is wrong with what goes with the features of a head, or None."""
    wrong = not_heads(heads, name)
    if wrong is not None:
        return wrong
    if not isinstance(qk_norm, QkNorm | None):
        return f"{name}: qk_norm is a {type(qk_norm).__name__}; it must be QkNorm(q_weight, k_weight, eps), or None"
    rotated = 0 if rotary is None else rotary.cos.shape[-1]
    if rotary is not None and (rotated % 2 or not 0 < rotated <= heads.dim):
        return f"{name}: rotary turns {rotated} features of each head, which has {heads.dim}; it must be an even number of them"
    return None if qk_norm is None else qk_norm.error(heads.dim, x.device, name)


def weight_error(
    heads: AttentionHeads, w: torch.Tensor, bias: torch.Tensor | None, world_size: int, name: str
) -> str | None:
    """Why `heads` do not fit w, bias or the ranks, or None."""
    wrong = not_heads(heads, name) or heads.error(world_size, name)
    if wrong is not None:
        return wrong
    if w.shape[:1] != (heads.features,):
        rows = f"{w.shape[:1].numel()} rows (shape {tuple(w.shape)})"
        return f"{name}: w has {rows}, {heads} needs {heads.features}; they must be equal"
    if bias is not None and bias.shape != (heads.features,):
        return f"{name}: bias has shape {tuple(bias.shape)}; it must be [{heads.features}], one per row of w"
    return None


def not_heads(heads: AttentionHeads, name: str) -> str | None:
    """Why `heads`, of whatever type, are no AttentionHeads, or None."""
    if isinstance(heads, AttentionHeads):
        return None
    return f"{name}: heads={heads!r} must be AttentionHeads(query=..., kv=..., dim=...)"


class Terms(NamedTuple):
    """What the caller says about a call. config, name: see linear_all_to_all. meaning: in what else ranks must agree, in words;
    it becomes part of the call's tags. Layout, heads and the like have kept these words; calls make only that of a part's length.
    on_plan: see all_gather_linear; of parts it is told that of the first."""

    config: OverlapConfig | None
    name: str
    meaning: tuple[str, ...] = ()
    on_plan: OnPlan | None = None

    def also(self, meaning: str) -> Terms:
        """These terms, in which ranks must agree on one thing more."""
        return self._replace(meaning=(*self.meaning, meaning))

    def in_parts(self, positions: int) -> Terms:
        """The terms of a part. Shards of other lengths may have equal parts, and more of them, which must not pair up."""
        return self.also(f"a part of {positions} positions a rank")


@dataclass(slots=True)  # made at each call
class Call:
    """One call of a Ulysses linear while it is planned, part by part. w: what is multiplied. bias: of w's rows, or None.

    trial, method: which trial this call belongs to, and whose turn it is; known when the first part is planned. takes_part: the
    same trial, also where the untuned plan has the turn.
    """

    spec: OperatorSpec
    w: torch.Tensor
    bias: torch.Tensor | None
    group: dist.ProcessGroup
    domain: OverlapDomain
    terms: Terms
    trial: Autotune | None = None
    method: str = ""
    takes_part: Autotune | None = None
    is_begun: bool = False

    @property
    def settings(self) -> OverlapConfig:
        return self.terms.config or self.domain.config

    def parts(self, x: torch.Tensor, shards: int, row_bytes: int) -> tuple[Part, ...]:
        """The parts of x [shards * positions, ..., C] and the plan of each. row_bytes: see cut_exchange."""
        positions, batch = x.shape[:1].numel() // shards, x.shape[1:-1].numel()
        if x.dim() < 2 or not row_bytes or not positions or not batch:
            self.plan(x)  # which raises, on every rank: there is nothing to cut
        places = cut_exchange(positions, batch, row_bytes, self.settings)
        if len(places) == 1:
            return (Part(0, positions, self.plan(x).linear(self.terms.name, self.terms.meaning)),)
        terms = self.terms.in_parts(positions)
        parts = []
        for first, last in places:
            planned = self.plan(x[: (last - first) * shards])  # as many rows as the part has: any will do
            parts.append(Part(first, last, planned.linear(terms.name, terms.meaning)))
        return tuple(parts)

    def plan(self, x: torch.Tensor) -> Planned:
        """The plan of a part x; see plan_of."""
        if not self.is_begun and self.settings.tune_steps:
            self._take_turn(x)
        self.is_begun = True
        config = self.terms.config if self.trial is None else self.settings.by(self.method)
        return plan_of(self.spec, x, self.w, self.bias, self.group, config, self.terms.name)

    def _take_turn(self, x: torch.Tensor) -> None:
        """Agree on a trial with the first part, and find whose turn it is."""
        config, name = self.terms.config, self.terms.name
        planned = plan_of(self.spec, x, self.w, self.bias, self.group, config, name, tries=True)
        self.takes_part = planned.trial
        method = planned.next_method(name) if isinstance(planned, InRun) else None
        if isinstance(planned, InRun) and method is not None:
            self.trial, self.method = planned.run, method

    def linear(self, parts: tuple[Part, ...], weight: torch.Tensor, copies: torch.Tensor | None, batch: int) -> Linear:
        """The call of these parts, ready to run. weight, copies, batch: see exchange.Linear."""
        if self.terms.on_plan is not None:
            self.terms.on_plan(parts[0].exchange.plan, self.takes_part)
        w = self.w.detach()
        if self.trial is None:
            return Linear(parts, weight, w, copies, batch)
        return TimedLinear(parts, weight, w, copies, batch, self.trial, self.terms.name, self.method)


def heads_linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, heads: AttentionHeads | None,
    group: dist.ProcessGroup, terms: Terms,
) -> tuple[Linear, torch.Tensor | None]:  # fmt: skip
    """A call of linear_all_to_all as planned, and the bias of this rank's columns."""
    domain = domain_of(group, terms.config, x.device)
    wrong = None if heads is None else weight_error(heads, w, bias, domain.world_size, terms.name)
    if wrong is not None:
        refuse(wrong, LINEAR_ALL_TO_ALL, group, terms.config, x.device, terms.name)
    copies = None if heads is None else heads.sent_rows(domain.world_size, w.device)
    # Copied at each call: nothing tells when a weight has changed. Optimizers write into buffers that parameters are views of.
    w_sent = w if copies is None else w.detach().index_select(0, copies).requires_grad_(w.requires_grad)
    bias_sent = bias if bias is None or copies is None else bias[copies]
    call = Call(
        LINEAR_ALL_TO_ALL, w_sent, bias_sent, group, domain, terms if heads is None else terms.also(heads.meaning)
    )
    # For one row of all ranks' shards a rank receives W rows of N' / W features.
    parts = call.parts(x, 1, w_sent.shape[:1].numel() * x.element_size())
    own_bias = None if bias_sent is None else bias_sent.chunk(domain.world_size)[domain.rank]
    return call.linear(parts, w, copies, rows_of_position(x)), own_bias


def rows_linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup, terms: Terms
) -> Linear:
    """A call of all_to_all_linear as planned."""
    domain = domain_of(group, terms.config, x.device)
    shards = domain.world_size if x.dim() > 1 and x.shape[0] % domain.world_size == 0 else 1  # plan_of refuses the rest
    call = Call(ALL_TO_ALL_LINEAR, w, bias, group, domain, terms)
    # For one row of all ranks' shards a rank receives a row of K features.
    received = domain.world_size * x.shape[-1:].numel() * x.element_size()
    return call.linear(call.parts(x, shards, received), w, None, rows_of_position(x))


def rows_of_position(x: torch.Tensor) -> int:
    """Rows of one position of x [positions, ..., C]."""
    return 1 if x.dim() == 2 else max(1, x.shape[1:-1].numel())


def like(x: torch.Tensor, positions: int, features: int) -> torch.Tensor:
    """A tensor [positions, b, features] for plans, in kind as x [*, b, *], that takes the memory of one element."""
    one = x.new_empty(1, 1, 1).expand(positions, x.shape[1], features)
    return one.requires_grad_() if x.requires_grad and torch.is_grad_enabled() else one
