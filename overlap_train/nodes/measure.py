"""How many SMs communication between nodes needs: measured once, when the nodes are connected, and the same on all ranks.

NCCL's CTAs copy between the GPU and what the network card reads. More of them than the wire needs only take SMs from products.
The sum of a node's partials gets the fewest SMs with which it is as fast as the network that takes it: with fewer the network
would wait for sums. Products leave all these SMs alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeAlias

import torch

from ..schedule.inter_node import send_recvs
from ..schedule.kinds import Kind
from ..schedule.order import Topology
from ..select.sm_budget import SmBudget, node_sum_gbs
from ..symmetric.agreement import Agreement, say_on_rank_0
from .engines import Piece, grid_of
from .nccl import Failures, NcclTransport

# Sockets carried 32 MiB in 4.5 to 10.8 ms within one run (2 x H200, a slow host). With one burst of each number of SMs, 8 looked
# better than 4.
_BURSTS = 4


def fastest_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few bursts of the same work."""
    return min(seconds(work, device) for _ in range(_BURSTS))


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device has done what `work` enqueues."""
    begin = time.perf_counter()
    work()
    torch.cuda.current_stream(device).synchronize()
    return time.perf_counter() - begin


Connect: TypeAlias = Callable[[int], NcclTransport]  # connects the rail peers with so many SMs, by all ranks together

COUNTS = (2, 4, 8)  # and as many as NCCL may have; half of them send while the others receive
# For twice the SMs the wire must carry so much more: a product loses about that without the next 4 SMs (benchmarks/notes.md).
WORTH = 1.05
_NBYTES, _EXCHANGES = 32 << 20, 4  # of one exchange; of one burst
_MEASURE = "overlap_train: measure the network between the nodes of the group"


def connect(
    agreement: Agreement, topology: Topology, device: torch.device, budget: SmBudget, by: Connect, failures: Failures
) -> tuple[NcclTransport, float]:
    """Connect the nodes. Returns the transport, and the GB/s that it carries in each direction on the slowest rank.

    Collective. Rank 0 prints what was found.

    Args:
        budget: what NCCL gets, or up to how many. Then it gets the fewest with which the wire carries what it can.

    Raises:
        OverlapTimeoutError: a rank did not come, or an exchange did not end.
    """

    def measure(network: NcclTransport) -> float:
        gbs = _gbs(topology, device, network)
        failures.check()
        return min(agreement.exchange(gbs, _MEASURE))

    with ExitStack() as opened:  # what fails leaves none of them open
        network, gbs = connect_with_fewest_sms(partial(_opened, by, opened), measure, counts_of(budget))
        opened.pop_all()
    limited = ", the most that it may have" if network.sms == budget.for_network and not budget.network_sms else ""
    found = f"carries {gbs:.1f} GB/s in each direction, and takes {network.sms} SMs for it{limited} (see network_sms)"
    say_on_rank_0(agreement.rank, f"NCCL between nodes {found}")
    return network, gbs


def counts_of(budget: SmBudget) -> tuple[int, ...]:
    """The numbers of SMs to try."""
    most = budget.for_network
    return (most,) if budget.network_sms else (*(count for count in COUNTS if count < most), most)


def _opened(by: Connect, opened: ExitStack, sms: int) -> NcclTransport:
    """A new transport, which ends with `opened`."""
    network = by(sms)
    opened.callback(network.close, orderly=False)
    return network


def connect_with_fewest_sms(
    by: Connect, measure: Callable[[NcclTransport], float], counts: Sequence[int]
) -> tuple[NcclTransport, float]:
    """Connect with more and more SMs, as `counts` says, until more carry no more. Returns the transport to use, and its GB/s; the
    others are closed.

    measure: returns the GB/s of a transport, the same on all ranks.
    """
    best = by(counts[0])
    gbs = measure(best)
    for count in counts[1:]:
        more = by(count)
        more_gbs = measure(more)
        if more_gbs < WORTH * gbs:
            more.close(orderly=True)
            break
        best.close(orderly=True)
        best, gbs = more, more_gbs
    return best, gbs


def _gbs(topology: Topology, device: torch.device, network: NcclTransport) -> float:
    """GB/s of this rank while it sends to the next node, and receives as much from the one before."""
    sent, received = (
        Piece(torch.zeros(_NBYTES, dtype=torch.uint8, device=device), torch.zeros(1, dtype=torch.int64, device=device))
        for _ in range(2)
    )
    first = send_recvs(Kind.GATHER, topology, chunks=1)[0]

    def exchange() -> None:
        network.exchange(first, sent, received).arrive()

    def burst() -> None:
        for _ in range(_EXCHANGES):
            exchange()

    seconds(exchange, device)  # NCCL connects, and the rail peers meet
    return _EXCHANGES * _NBYTES / fastest_s(burst, device) / 1e9


_SUM_NBYTES = 64 << 20  # of the blocks that one sum reads: more than an L2 holds
_SUMS = 8  # of a burst, which outweigh its launches
_MEASURE_SUM = "overlap_train: measure the sum of a node's partials"


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
    sms, gbs = fewest_sms(needed, lambda count: min(agreement.exchange(probe.gbs(count), _MEASURE_SUM)), most)
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

    def __init__(self, device: torch.device, local: int, nbytes: int = _SUM_NBYTES) -> None:
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
