"""The exchanges of the parts of a long sequence, each begun before the one before it is read (protocol/slot_use.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from ..operators.all_to_all_gemm import Receiver
from ..operators.gemm_all_to_all import Exchange
from ..operators.start import start_all_to_all_gemm, start_gemm_all_to_all, start_pulled_gemm_all_to_all
from ..planning.plan import EnginePlan
from ..protocol.tags import Tag
from ..runtime.domain import OverlapDomain

Give = Callable[[], torch.Tensor]
Read = Callable[[Any], None]  # takes what `start` returns


@dataclass(slots=True)  # made at each call: frozen it would take 0.7 microseconds more
class Step:
    """One all-to-all, an operator of its own.

    bracket: of that operator. give: makes what is sent, [W, rows, C]. read: takes what has come; until it returns the slot is
    this step's.
    """

    domain: OverlapDomain
    plan: EnginePlan
    tag: Tag
    bracket: AbstractContextManager[None]
    give: Give
    read: Read

    def start(self, sent: torch.Tensor) -> Receiver | Exchange:
        return start_all_to_all_gemm(self.domain, self.plan, self.tag, sent)

    def with_product(self, b_kn: torch.Tensor, into: torch.Tensor | None, is_pulled: bool) -> ProductStep:
        """This step as a GEMM + A2A, in which what is given is multiplied by b_kn [K, N] first. into, is_pulled: see
        ProductStep."""
        return ProductStep(self.domain, self.plan, self.tag, self.bracket, self.give, self.read, b_kn, into, is_pulled)

    def may_go_before(self, reader: Step) -> bool:
        """Whether this step may begin before `reader`, the step before it, reads. Only copies may: what the reader's kernel is
        yet to send would come after it."""
        return self.plan.sends_ahead and reader.plan.sends_ahead


@dataclass(slots=True)
class ProductStep(Step):
    """One GEMM + A2A: x [rows, K] @ b_kn [K, N], of which each rank gets columns. give: x.

    into: where what arrives belongs, or None. is_pulled: it is pulled, beside the product of the next step.
    """

    b_kn: torch.Tensor
    into: torch.Tensor | None
    is_pulled: bool

    def start(self, sent: torch.Tensor) -> Exchange:
        if self.is_pulled and self.into is not None:
            return start_pulled_gemm_all_to_all(self.domain, self.plan, self.tag, sent, self.b_kn, self.into)
        return start_gemm_all_to_all(self.domain, self.plan, self.tag, sent, self.b_kn, self.into)

    def may_go_before(self, reader: Step) -> bool:
        """Whether this step may begin before `reader`, the step before it, reads. It may where nothing is read but by copies,
        which go on beside this product."""
        return isinstance(reader, ProductStep) and reader.is_pulled


def run_steps(steps: Sequence[Step]) -> None:
    """Begin and read step after step. Where copies send, a step's blocks leave before the step before it reads.

    They are made first of all. That may take a product, which then hides the blocks that the step before it has sent. Where a
    step is pulled, the next step's product begins before its blocks have come.
    """
    ahead: Receiver | Exchange | None = None
    for step, following in zip_longest(steps, steps[1:]):
        with step.bracket:
            receiver, ahead = ahead or step.start(step.give()), None
            if following is not None and following.may_go_before(step):
                sent = following.give()
                step.domain.begin_ahead()
                ahead = following.start(sent)
            step.read(receiver)
