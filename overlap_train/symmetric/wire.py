"""How many SMs NCCL needs between the nodes of a group: measured once, where the twins are connected, and the same on all ranks.

NCCL's CTAs copy between the GPU and what the network card reads. More of them than the wire needs only take SMs from products.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeAlias

import torch

from ..planning.schedule import GATHER, Topology, crossings
from .agreement import Agreement
from .inter_node import Failures, Piece, StreamTransport

Connect: TypeAlias = Callable[[int], StreamTransport]  # with so many SMs, by all ranks together

COUNTS = (2, 4, 8, 16)  # half of them send while the others receive; without 16 of 132 SMs a product takes 7 % longer
WORTH = (
    1.05  # so much more must the wire carry for twice the SMs: about what a product loses without the next 4 (notes.md)
)
# The best of so many bursts counts: sockets carried 32 MiB in 4.5 to 10.8 ms within one run (2 x H200, a slow host), and with one
# burst of each number 8 SMs looked better than 4.
_NBYTES, _EXCHANGES, _BURSTS = 32 << 20, 4, 4
_MEASURE = "overlap_train: measure the network between the nodes of the group"


def connect(
    agreement: Agreement, topology: Topology, device: torch.device, sms: int, by: Connect, failures: Failures
) -> tuple[StreamTransport, float]:
    """The transport between the connected nodes, and the GB/s that it carries in each direction: those of the slowest rank.
    Collective. Rank 0 prints what was found.

    Args:
        sms: that NCCL gets; 0: the fewest with which the wire carries what it can.

    Raises:
        OverlapTimeoutError: a rank did not come, or an exchange did not end.
    """

    def measure(network: StreamTransport) -> float:
        gbs = _gbs(topology, device, network)
        failures.check()
        return min(agreement.exchange(gbs, _MEASURE))

    if sms:
        network = by(sms)
        gbs = measure(network)
    else:
        network, gbs = fewest(by, measure)
    if agreement.rank == 0:
        print(
            f"overlap_train: NCCL between nodes carries {gbs:.1f} GB/s in each direction, and takes {network.sms} SMs for it "
            f"(see network_sms)",
            file=sys.stderr,
            flush=True,
        )
    return network, gbs


def fewest(by: Connect, measure: Callable[[StreamTransport], float]) -> tuple[StreamTransport, float]:
    """The transport with the fewest SMs of COUNTS that carries what the wire can, and the GB/s that it carries. measure: GB/s of
    a transport, the same on all ranks."""
    best = by(COUNTS[0])
    gbs = measure(best)
    for count in COUNTS[1:]:
        more = by(count)
        more_gbs = measure(more)
        if more_gbs < WORTH * gbs:
            more.close(orderly=True)
            break
        best.close(orderly=True)
        best, gbs = more, more_gbs
    return best, gbs


def _gbs(topology: Topology, device: torch.device, network: StreamTransport) -> float:
    """GB/s of this rank while it sends to the next node, and receives as much from the one before."""
    sent, received = (
        Piece(torch.zeros(_NBYTES, dtype=torch.uint8, device=device), torch.zeros(1, dtype=torch.int64, device=device))
        for _ in range(2)
    )
    crossing = crossings(GATHER, topology, chunks=1)[0]

    def seconds(times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            network.exchange(crossing, sent, received).arrive()
        torch.cuda.current_stream(device).synchronize()
        return time.perf_counter() - begin

    seconds(1)  # NCCL connects, and the twins meet
    return _EXCHANGES * _NBYTES / min(seconds(_EXCHANGES) for _ in range(_BURSTS)) / 1e9
