"""All-to-alls of the parts of a long sequence, each sent before the one before it is read (protocol/slot_use.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from ..operators.all_to_all_gemm import Receiver
from ..operators.start import start_all_to_all_gemm
from ..planning.plan import EnginePlan
from ..protocol.tags import Tag
from ..runtime.domain import OverlapDomain
from ..runtime.profiling import profiled

Give = Callable[[], torch.Tensor]
Read = Callable[[Receiver], None]


@dataclass(frozen=True)
class Step:
    """One all-to-all, an operator of its own.

    range: its name for profilers. give: makes what is sent, [W, rows, C]. read: takes what has come; until it returns the slot is
    this step's.
    """

    domain: OverlapDomain
    plan: EnginePlan
    tag: Tag
    range: str
    give: Give
    read: Read

    def start(self, sent: torch.Tensor) -> Receiver:
        return start_all_to_all_gemm(self.domain, self.plan, self.tag, sent)

    def may_go_before(self, reader: Step) -> bool:
        """Only copies may: what the reader's kernel is yet to send would come after it."""
        return self.plan.sends_ahead and reader.plan.sends_ahead


def run_steps(steps: Sequence[Step]) -> None:
    """Send and read step after step. Where copies send, a step's blocks leave before the step before it reads.

    They are made first of all. That may take a product, which then hides the blocks that the step before it has sent.
    """
    ahead: Receiver | None = None
    for step, following in zip_longest(steps, steps[1:]):
        with step.domain.operator(step.tag, step.plan.slots), profiled(step.range):
            receiver, ahead = ahead or step.start(step.give()), None
            if following is not None and following.may_go_before(step):
                sent = following.give()
                step.domain.begin_ahead()
                ahead = following.start(sent)
            step.read(receiver)
