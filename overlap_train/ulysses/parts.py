"""A long sequence passes through symmetric memory in parts, each begun before the one before it is read (group/workspace.py).

Llama-3 8B takes 384 MiB of symmetric memory for 32 k tokens on two ranks, and 480 for 256 k. Each part is a call of its own: the
same positions of every rank's shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import zip_longest
from math import gcd
from typing import Any, NamedTuple

import torch

from ..config import OverlapConfig
from ..group.domain import OverlapDomain
from ..group.signals import Tag
from ..group.slots import SLOTS
from ..ops.a2a_gemm import AllToAllGemm
from ..ops.gemm_a2a import PULLED, GemmAllToAll
from ..ops.plan import EnginePlan
from ..ops.planned import PlannedOp
from ..select.system import H200

Give = Callable[[], torch.Tensor]
Read = Callable[[Any], None]  # takes what `start` returns


class Factor(NamedTuple):
    """What a step multiplies before its all-to-all: each rank gets columns of x [rows, K] @ b_kn [K, N]. into: the memory where
    arriving blocks belong, or None. is_last: no step follows."""

    b_kn: torch.Tensor
    into: torch.Tensor | None
    is_last: bool


@dataclass(slots=True)  # made at each call: frozen it would take 0.7 microseconds more
class Step:
    """One all-to-all of one part: an operator with a scope of its own. give: makes the blocks to send, [W, rows, C], or x if
    there is a factor. read: takes what `start` returned; the step keeps its slot until `read` returns."""

    domain: OverlapDomain
    plan: EnginePlan
    tag: Tag
    scope: AbstractContextManager[None]
    give: Give
    read: Read
    factor: Factor | None = None

    def start(self, sent: torch.Tensor) -> AllToAllGemm | GemmAllToAll:
        if self.factor is None:
            return self.plan.start(self.domain, self.tag, sent)
        b_kn, into = self.factor.b_kn, self.factor.into
        if self.is_pulled:
            return PULLED[self.plan.method](self.domain, self.plan, self.tag, sent, b_kn, into)
        return self.plan.start(self.domain, self.tag, sent, b_kn, into)

    @property
    def is_pulled(self) -> bool:
        """Whether ranks pull the blocks of this product from each other, while the next step multiplies."""
        factor = self.factor
        return factor is not None and factor.into is not None and not factor.is_last and self.plan.may_pull

    def may_go_before(self, reader: Step) -> bool:
        """Whether this step may begin before `reader`, the step before it, reads: if copies send in both steps (what a kernel of
        the reader is yet to send would come after what this step sends), with factors if the reader's blocks are pulled."""
        if self.factor is None:
            return self.plan.sends_ahead and reader.plan.sends_ahead
        return reader.is_pulled


def run_steps(steps: Sequence[Step]) -> None:
    """Begin and read one step after the other. What a step multiplies that goes before its predecessor reads hides what that has
    sent."""
    ahead: AllToAllGemm | GemmAllToAll | None = None
    for step, following in zip_longest(steps, steps[1:]):
        with step.scope:
            receiver, ahead = ahead or step.start(step.give()), None
            if following is not None and following.may_go_before(step):
                sent = following.give()
                step.domain.begin_ahead()
                ahead = following.start(sent)
            step.read(receiver)


@dataclass(frozen=True)
class Part:
    """Positions first ... last - 1 of the first dimension of every rank's shard. exchange: their planned operator. over_tp: under
    tensor parallelism that of the TP group, which multiplies.

    forward, backward and again return the step of a pass. give, read, factor: see Step.
    """

    first: int
    last: int
    exchange: PlannedOp
    over_tp: PlannedOp | None = None

    @property
    def product(self) -> PlannedOp:
        """The operator that multiplies."""
        return self.over_tp or self.exchange

    def forward(self, give: Give, read: Read, factor: Factor | None = None) -> Step:
        op = self.exchange
        return Step(op.domain, op.plan.fprop, op.tags.fprop, op.forward, give, read, factor)

    def backward(self, give: Give, read: Read, factor: Factor | None = None, is_alone: bool = False) -> Step:
        """is_alone: no weight gradient is wanted."""
        op = self.exchange
        plan = op.plan.dgrad_alone if is_alone else op.plan.dgrad
        return Step(op.domain, plan, op.tags.dgrad, op.backward[True, False], give, read, factor)

    def again(self, give: Give, read: Read) -> Step:
        """The step in which this rank sends once more, for the weight gradient, what forward has sent."""
        domain, plan, tags = self.exchange.domain, self.exchange.plan.wgrad, self.exchange.tags
        assert plan is not None, "what forward has received was kept"
        scope = domain.operator(tags.wgrad, plan.slots, shown_as=tags.ranges.wgrad)
        return Step(domain, plan, tags.wgrad, scope, give, read)


_MIB = 1 << 20
_MOST_OF = 7 / 8  # a part uses at least so much of what fits
# Rows. A part of an odd number of tiles cannot be sent in chunks, and its product waits for all of it: A2A + GEMM of 262144
# x 4096 x 4096 took 1.21 times as long as its GEMM in parts of 147 tiles; of 491520 rows, in parts of 160, 1.02 times (2 x H200).
# Smaller units where that would leave much of a slot empty, or almost nothing for the last part.
_UNITS = (1024, 512, 256, 128)
# Where the product of one part hides the exchange of another, what is left is one part's exchange. A part costs the host some 150
# microseconds: a gather 57, a push 30, a wait, what packs and unpacks. So its product takes about as long, forward.
_MOST_TO_HIDE, _LEAST_ROWS, _LEAST_GEMM_US = 4, 1024, 150.0


def parts_that_hide(rows: int, n: int, k: int) -> int:
    """Into how many parts a product [rows, k] @ [k, n] is worth cutting, so that each hides the exchange of another."""
    gemm_us = 2 * rows * n * k / (H200.sustained_tflops * 1e6)
    return max(1, min(_MOST_TO_HIDE, rows // _LEAST_ROWS, int(gemm_us // _LEAST_GEMM_US)))


def cut(
    positions: int, bytes_of_position: int, limit_mib: int, batch: int = 1, wanted: int = 1
) -> list[tuple[int, int]]:
    """(first, last) of each part of a shard's positions, as few as fit into `limit_mib` for all slots. bytes_of_position: that a
    rank receives for one position of every rank's shard. batch: rows of one position. wanted: parts, where fewer would fit."""
    fits = min(int(limit_mib * _MIB // (SLOTS * bytes_of_position)), -(-positions // wanted))
    if positions <= fits:
        return [(0, positions)]
    units = (*(rows // gcd(rows, batch) for rows in _UNITS), 1)
    step = next(step for unit in units if (step := _step(positions, max(1, fits), unit)))
    return [(first, min(first + step, positions)) for first in range(0, positions, step)]


def cut_exchange(positions: int, batch: int, row_bytes: int, config: OverlapConfig) -> list[tuple[int, int]]:
    """`cut` of an exchange alone. row_bytes: that a rank receives for one row of every rank's shard."""
    return cut(positions, batch * row_bytes, config.exchange_limit_mib, batch)


def _step(positions: int, fits: int, unit: int) -> int:
    """Positions of a part, a multiple of `unit`, so that parts are as few and as equal as can be; 0: another unit is better."""
    most = fits // unit * unit
    if unit > 1 and most < _MOST_OF * fits:
        return 0
    step = -(-positions // -(-positions // most))  # equal parts share a plan
    step = -(-step // unit) * unit
    last = positions - (-(-positions // step) - 1) * step
    return 0 if unit > 1 and 2 * last < step else step
