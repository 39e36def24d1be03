"""How many SMs NCCL needs between nodes: measured once, when the nodes are connected, and the same on all ranks.

NCCL's CTAs copy between the GPU and what the network card reads. More of them than the wire needs only take SMs from products.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeAlias

import torch

from ..schedule.inter_node import send_recvs
from ..schedule.kinds import Kind
from ..schedule.order import Topology
from ..symmetric.agreement import Agreement, say_on_rank_0
from .engines import Piece
from .nccl import Failures, NcclTransport
from .sm_budget import SmBudget

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
    first = send_recvs(Kind.AG_GEMM, topology, chunks=1)[0]

    def exchange() -> None:
        network.exchange(first, sent, received).arrive()

    def burst() -> None:
        for _ in range(_EXCHANGES):
            exchange()

    seconds(exchange, device)  # NCCL connects, and the rail peers meet
    return _EXCHANGES * _NBYTES / fastest_s(burst, device) / 1e9
