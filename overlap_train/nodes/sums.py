"""How many SMs the sum of a node's partials may hold: the fewest with which it is as fast as the network that takes it.

Products beside it leave these SMs alone. With fewer the network would wait for sums, with more products would be longer for
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..schedule.order import Topology
from ..select.sm_budget import node_sum_gbs
from ..symmetric.agreement import Agreement, say_on_rank_0
from .wire import fastest_s, seconds

_NBYTES = 64 << 20  # of the blocks that one sum reads: more than an L2 holds
_SUMS = 8  # of a burst, which outweigh its launches
_MEASURE = "overlap_train: measure the sum of a node's partials"


def grid_of(own: torch.Tensor, count: int, sms: int) -> tuple[int, int]:
    """(programs, BLOCK) of add_blocks_kernel for `count` blocks like `own`. sms: that it may hold, one a program; 0: all."""
    from ..kernels.add_blocks import MOST_OF_64_KIB, ON_ALL_SMS, ON_FEW_SMS

    size, nbytes = own.numel(), ON_FEW_SMS if sms and count <= MOST_OF_64_KIB else ON_ALL_SMS
    block = min(nbytes // own.element_size(), 1 << (size - 1).bit_length())
    tiles = -(-size // block)
    return min(sms or tiles, tiles), block


def settle(agreement: Agreement, topology: Topology, device: torch.device, wire_gbs: float, sms: int, most: int) -> int:
    """Decide how many SMs the sum of a node may hold. Collective. Rank 0 prints what was found.

    Args:
        wire_gbs: what the network carries in each direction, the same on all ranks.
        sms: what the sum gets; 0: the fewest with which it is as fast as the network, and at most `most`.

    Raises:
        OverlapTimeoutError: a rank did not come.
    """
    if sms or topology.local == 1:
        return sms
    needed, probe = node_sum_gbs(topology.local, wire_gbs), SumProbe(device, topology.local)
    sms, gbs = fewest_sms(needed, lambda count: min(agreement.exchange(probe.gbs(count), _MEASURE)), most)
    limited = ", the most that they may have" if gbs < needed else ""
    found = f"read and write {gbs:.1f} GB/s on {sms} SMs{limited}; the network takes {needed:.1f} (see reduce_sms)"
    say_on_rank_0(agreement.rank, f"sums of a node {found}")
    return sms


def fewest_sms(needed: float, measure: Callable[[int], float], most: int) -> tuple[int, float]:
    """Find the fewest SMs that reach `needed` GB/s, or `most` (select/sm_budget.py). Returns them, and what they reach.

    measure: returns the GB/s of so many SMs, the same on all ranks. Each SM more brings less than the one before it. Therefore
    the number worked out from the last figure is never too many.
    """
    sms, gbs = 1, measure(1)
    while gbs < needed and sms < most:
        sms = min(most, max(sms + 1, math.ceil(sms * needed / gbs)))
        gbs = measure(sms)
    return sms, gbs


class SumProbe:
    """Measures the sum of a node of `local` ranks. nbytes: of the partials together."""

    def __init__(self, device: torch.device, local: int, nbytes: int = _NBYTES) -> None:
        size, self._device = nbytes // local // 2, device
        self._own, self.total = (torch.zeros(size, dtype=torch.bfloat16, device=device) for _ in range(2))
        self._received = torch.zeros(local - 1, size, dtype=torch.bfloat16, device=device)
        self._order = torch.arange(local - 1, device=device)
        self._abort = torch.zeros(1, dtype=torch.int64, device=device)
        self._moved = (local + 1) * self._own.nbytes

    def gbs(self, sms: int) -> float:
        """GB/s that so many SMs read and write."""

        def burst() -> None:
            for _ in range(_SUMS):
                self._add(sms)

        seconds(burst, self._device)  # it is compiled, and clocks rise
        return _SUMS * self._moved / fastest_s(burst, self._device) / 1e9

    def _add(self, sms: int) -> None:
        from ..kernels.add_blocks import WARPS, add_blocks_kernel

        own, received = self._own, self._received
        programs, block = grid_of(own, len(received), sms)
        add_blocks_kernel[(programs,)](
            own, received, self._order, self.total, own.numel(), received.stride(0), self._abort,
            COUNT=len(received), BLOCK=block, num_warps=WARPS,
        )  # fmt: skip
