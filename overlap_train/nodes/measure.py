"""How many SMs NCCL needs between nodes: measured once, when the nodes are connected, and the same on all ranks.

NCCL's CTAs copy between the GPU and what the network card reads. More of them than the wire needs only take SMs from products.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from ..group.signals import FaultRecord
from ..schedule.inter_node import send_recvs
from ..schedule.kinds import Kind
from ..schedule.order import Topology
from ..symmetric.agreement import Agreement, say_on_rank_0
from .engines import Piece
from .nccl import NcclTransport
from .sm_budget import SmBudget

COUNTS = (2, 4, 8)  # and as many as NCCL may have; half of them send while the others receive
# For twice the SMs the wire must carry so much more: a product loses about that without the next 4 SMs (benchmarks/notes.md).
WORTH = 1.05
_NBYTES, _EXCHANGES = 32 << 20, 4  # of one exchange; of one burst
# Sockets carried 32 MiB in 4.5 to 10.8 ms within one run (2 x H200, a slow host). With one burst of each number of SMs, 8 looked
# better than 4.
_BURSTS = 4
_MEASURE = "overlap_train: measure the network between the nodes of the group"


def connect(
    agreement: Agreement, topology: Topology, device: torch.device, budget: SmBudget,
    by: Callable[[int], NcclTransport], fault: FaultRecord,
) -> tuple[NcclTransport, float]:  # fmt: skip
    """Connect the nodes. Returns the transport, and the GB/s that it carries in each direction on the slowest rank.

    Collective. Rank 0 prints what was found.

    Args:
        budget: what NCCL gets, or up to how many. Then it gets the fewest with which the wire carries what it can.
        by: connects the rail peers with so many SMs, by all ranks together.

    Raises:
        OverlapTimeoutError: a rank did not come, or an exchange did not end.
    """
    best, gbs, most = None, 0.0, budget.for_network
    with ExitStack() as opened:  # what fails leaves none of them open
        for sms in (most,) if budget.network_sms else (*(count for count in COUNTS if count < most), most):
            network = by(sms)
            opened.callback(network.close, orderly=False)
            mine = _gbs(topology, device, network)
            fault.check()
            carried = min(agreement.exchange(mine, _MEASURE))
            if best is not None and carried < WORTH * gbs:
                network.close(orderly=True)
                break
            if best is not None:
                best.close(orderly=True)
            best, gbs = network, carried
        opened.pop_all()
    assert best is not None
    limited = ", the most that it may have" if best.sms == most and not budget.network_sms else ""
    found = f"carries {gbs:.1f} GB/s in each direction, and takes {best.sms} SMs for it{limited} (see network_sms)"
    say_on_rank_0(agreement.rank, f"NCCL between nodes {found}")
    return best, gbs


def _gbs(topology: Topology, device: torch.device, network: NcclTransport) -> float:
    """GB/s of this rank while it sends to the next node, and receives as much from the one before."""
    sent, received = (
        Piece(torch.zeros(_NBYTES, dtype=torch.uint8, device=device), torch.zeros(1, dtype=torch.int64, device=device))
        for _ in range(2)
    )
    first = send_recvs(Kind.AG_GEMM, topology, chunks=1)[0]

    def seconds(exchanges: int) -> float:
        begin = time.perf_counter()
        for _ in range(exchanges):
            network.exchange(first, sent, received).arrive()
        torch.cuda.current_stream(device).synchronize()
        return time.perf_counter() - begin

    seconds(1)  # NCCL connects, and the rail peers meet
    return _EXCHANGES * _NBYTES / min(seconds(_EXCHANGES) for _ in range(_BURSTS)) / 1e9
