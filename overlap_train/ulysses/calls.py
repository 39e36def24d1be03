"""Calls of Ulysses' linears as planned: in which parts, and with which plan for each (under TP: two_group_calls.py).

All parts of a call run by one method. Where methods take turns, the first part asks which one (select/autotune.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..config import OverlapConfig
from ..operators.call_plan import plan_of, refuse
from ..operators.in_trial import InTrial
from ..operators.planned import OnPlan, Planned
from ..planning.heads import AttentionHeads
from ..planning.spec import ALL_TO_ALL_LINEAR, LINEAR_ALL_TO_ALL, OperatorSpec
from ..runtime.domain import OverlapDomain
from ..runtime.registry import domain_of
from ..select.autotune import Autotune as Trial
from .arguments import weight_error
from .exchange import Linear
from .parts import Part, cut_exchange
from .turns import TimedLinear


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
    trial: Trial | None = None
    method: str = ""
    takes_part: Trial | None = None
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
        method = planned.next_method(name) if isinstance(planned, InTrial) else None
        if isinstance(planned, InTrial) and method is not None:
            self.trial, self.method = planned.in_trial, method

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
