"""A long sequence passes through symmetric memory in parts, whose size is bounded.

Llama-3 8B takes 384 MiB of it for 32 k tokens on two ranks, and 480 for 256 k.

Each part is a call of its own: the same positions of every rank's shard. A slot has to hold what one call receives, and there are
three of them (protocol/workspace.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from ..config import OverlapConfig
from ..operators.planned import PlannedLinear
from ..protocol.layout import SLOTS
from ..select.system import H200, System
from .ahead import Give, Read, Step

_MIB = 1 << 20
_MOST_OF = 7 / 8  # a part uses at least so much of what fits
# Rows. A part of an odd number of tiles cannot be sent in chunks, and its product waits for all of it: A2A + GEMM of 262144
# x 4096 x 4096 took 1.21 times as long as its GEMM in parts of 147 tiles; of 491520 rows, in parts of 160, 1.02 times (2 x H200).
# Smaller units where that would leave much of a slot empty, or almost nothing for the last part.
_UNITS = (1024, 512, 256, 128)
# Where the product of one part hides the exchange of another, what is left is one part's exchange. A part costs the host some 150
# microseconds: a gather 57, a push 30, a wait, what packs and unpacks. So its product takes about as long, forward.
_MOST_TO_HIDE, _LEAST_ROWS, _LEAST_GEMM_US = 4, 1024, 150.0


@dataclass(frozen=True)
class Part:
    """Positions first ... last - 1 of the first dimension of every rank's shard, and the plan of their exchange.

    forward, backward, backward_alone and again return the step of a pass. give, read: see Step.
    """

    first: int
    last: int
    exchange: PlannedLinear

    def forward(self, give: Give, read: Read) -> Step:
        exchange = self.exchange
        return Step(exchange.domain, exchange.plan.fprop, exchange.tags.fprop, exchange.forward, give, read)

    def backward(self, give: Give, read: Read) -> Step:
        exchange = self.exchange
        bracket = exchange.backward(wants_dx=True, wants_dw=False)  # what is sent again is another step
        return Step(exchange.domain, exchange.plan.dgrad, exchange.tags.dgrad, bracket, give, read)

    def backward_alone(self, give: Give, read: Read) -> Step:
        """The same where no weight gradient is wanted."""
        return replace(self.backward(give, read), plan=self.exchange.plan.dgrad_alone)

    def again(self, give: Give, read: Read) -> Step:
        """The step in which this rank sends once more, for the weight gradient, what forward has sent."""
        domain, plan, tags = self.exchange.domain, self.exchange.plan.wgrad, self.exchange.tags
        assert plan is not None, "what forward has received was kept"
        bracket = domain.operator(tags.wgrad, plan.slots, shown_as=tags.ranges[2])
        return Step(domain, plan, tags.wgrad, bracket, give, read)


def parts_that_hide(rows: int, n: int, k: int, system: System = H200) -> int:
    """The number of parts into which a product [rows, k] @ [k, n] is worth cutting, so that each hides the exchange of another;
    1: it stays whole."""
    gemm_us = 2 * rows * n * k / (system.sustained_tflops * 1e6)
    return max(1, min(_MOST_TO_HIDE, rows // _LEAST_ROWS, int(gemm_us // _LEAST_GEMM_US)))


def cut(
    positions: int, bytes_of_position: int, limit_mib: int, batch: int = 1, wanted: int = 1
) -> list[tuple[int, int]]:
    """(first, last) of each part of a shard's positions, as few as fit into `limit_mib` for all slots.

    Args:
        bytes_of_position: that a rank receives for one position of every rank's shard.
        batch: rows of one position.
        wanted: parts, where fewer would fit.
    """
    fits = min(_fitting(bytes_of_position, limit_mib), -(-positions // wanted))
    if positions <= fits:
        return [(0, positions)]
    units = (*(rows // gcd(rows, batch) for rows in _UNITS), 1)
    step = next(step for unit in units if (step := _step(positions, max(1, fits), unit)))
    return [(first, min(first + step, positions)) for first in range(0, positions, step)]


def cut_exchange(positions: int, batch: int, row_bytes: int, config: OverlapConfig) -> list[tuple[int, int]]:
    """`cut` of an exchange alone, in training, in the table of linears and in the tuner.

    batch: rows of one position. row_bytes: that a rank receives for one row of every rank's shard.
    """
    return cut(positions, batch * row_bytes, config.exchange_limit_mib, batch)


def _fitting(bytes_of_position: int, limit_mib: int) -> int:
    """Positions of which a slot holds what a rank receives."""
    return int(limit_mib * _MIB // (SLOTS * bytes_of_position))


def _step(positions: int, fits: int, unit: int) -> int:
    """Positions of a part, a multiple of `unit`, so that parts are as few and as equal as can be; 0: another unit is better."""
    most = fits // unit * unit
    if unit > 1 and most < _MOST_OF * fits:
        return 0
    step = -(-positions // -(-positions // most))  # equal parts share a plan
    step = -(-step // unit) * unit
    last = positions - (-(-positions // step) - 1) * step
    return 0 if unit > 1 and 2 * last < step else step
