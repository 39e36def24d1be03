"""The exchanges of the parts of a long sequence, each begun before the one before it is read (protocol/slot_use.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from ..group.domain import OverlapDomain
from ..group.signals import Tag
from ..ops.a2a_gemm import Receiver
from ..ops.gemm_a2a import Exchange
from ..ops.plan import EnginePlan
from ..ops.table import start_all_to_all_gemm, start_gemm_all_to_all, start_pulled_gemm_all_to_all

Give = Callable[[], torch.Tensor]
Read = Callable[[Any], None]  # takes what `start` returns


@dataclass(slots=True)  # made at each call: frozen it would take 0.7 microseconds more
class Step:
    """One all-to-all of one part: an operator with a bracket of its own.

    give: makes the blocks to send, [W, rows, C]. read: takes what `start` returned, and what has arrived from it; the step keeps
    its slot until `read` returns.
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
        """This step with a product in front of its all-to-all. b_kn, into, is_pulled: see ProductStep."""
        return ProductStep(self.domain, self.plan, self.tag, self.bracket, self.give, self.read, b_kn, into, is_pulled)

    def may_go_before(self, reader: Step) -> bool:
        """Whether this step may begin before `reader`, the step before it, reads. It may if copies send in both steps: what a
        kernel of the reader is yet to send would come after what this step sends."""
        return self.plan.sends_ahead and reader.plan.sends_ahead


@dataclass(slots=True)
class ProductStep(Step):
    """One GEMM + A2A of one part: each rank gets columns of x [rows, K] @ b_kn [K, N]. give: makes x.

    into: the memory where arriving blocks belong, or None. is_pulled: whether ranks pull these blocks from each other while the
    next step multiplies.
    """

    b_kn: torch.Tensor
    into: torch.Tensor | None
    is_pulled: bool

    def start(self, sent: torch.Tensor) -> Exchange:
        if self.is_pulled and self.into is not None:
            return start_pulled_gemm_all_to_all(self.domain, self.plan, self.tag, sent, self.b_kn, self.into)
        return start_gemm_all_to_all(self.domain, self.plan, self.tag, sent, self.b_kn, self.into)

    def may_go_before(self, reader: Step) -> bool:
        """Whether this step may begin before `reader`, the step before it, reads. It may if the reader's blocks are pulled:
        copies pull them beside this step's product."""
        return isinstance(reader, ProductStep) and reader.is_pulled


def run_steps(steps: Sequence[Step]) -> None:
    """Begin and read one step after the other. A step that may go before its predecessor reads begins at that time.

    First its blocks are made. If that takes a product, the product hides what the predecessor has sent. If the predecessor is
    pulled, the product of the step hides that.
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
