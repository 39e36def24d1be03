"""NCCL between the GPUs of different nodes: what a rank sends to one rail peer, and what it receives from another meanwhile.

A kernel of NCCL holds SMs until the peer's kernel runs, too. So a receive is never posted early: it goes with the send of the
same turn, as one group (schedule/inter_node.py). All groups of a rank run in one stream, in an order that all rail
peers have in common. None waits for a later one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..gpu.driver import leave_captures_alone
from ..group.signals import FaultRecord
from ..ranks.agreement import Agreement, OverlapTimeoutError
from ..ranks.bounded import bounded
from ..schedule.inter_node import SendRecv
from ..schedule.order import Topology
from .engines import CONNECT, Exchange, connect_rail_peers

_LOOK_S = 0.5
_QUEUED_S = 3600.0  # that an exchange may stand behind other work: torch's watchdog counts from when the host enqueues


class NcclExchange:
    """One group under way. ready: an event in the stream that sends, after which it may start."""

    def __init__(self, work: Any, exchanged: SendRecv, ready: torch.cuda.Event) -> None:
        self.exchanged, self._work, self._ready = exchanged, work, ready
        self._began: float | None = None

    def arrive(self) -> None:
        """Hold the current stream until the data are there, and until what was sent may be written over."""
        self._work.wait()

    def is_done(self) -> bool:
        return bool(self._work.is_completed())

    def is_late(self, timeout_s: float) -> bool:
        """Whether so many seconds have passed since it could start. Asked of the oldest exchange alone: before, the one in front
        of it ran."""
        if self._began is None:
            # CUDA's errors are reported to whoever synchronises; with one the exchange counts as begun.
            with contextlib.suppress(RuntimeError):
                if not self._ready.query():
                    return False
            self._began = time.monotonic()
        return time.monotonic() - self._began > timeout_s


def pieces_of(exchange: Exchange) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(what is sent, where what comes meanwhile belongs): data, and the word that becomes their signal."""
    call, received = exchange.call, exchange.exchanged.received
    into = call.chunk_of(received.fills, received.chunk) if exchange.buffer is None else exchange.buffer
    return [(exchange.source, into), (call.slot.epoch, call.crossed(received))]


class NcclTransport:
    """A communicator of the rail peers of this rank. NCCL waits without end. Therefore a thread watches the oldest exchange, and
    what the waits of this rank have found. If either has failed, it ends the communicator: no stream hangs.

    sms: how many CTAs NCCL may have, each of which holds an SM. Half of them send while the others receive.
    """

    needs_buffers = True

    def __init__(
        self,
        agreement: Agreement,
        topology: Topology,
        device: torch.device,
        timeout_s: float,
        fault: FaultRecord,
        sms: int,
    ) -> None:
        self._topology, self._timeout_s, self._fault = topology, timeout_s, fault
        self._under_way: deque[NcclExchange] = deque()
        self._ended = threading.Event()
        self._callers = agreement.callers(range(topology.rank % topology.local, topology.world, topology.local))
        connect = partial(self._connect, device, sms)
        self._group = connect_rail_peers(agreement, topology, "NCCL", connect, lambda group: group.abort())
        threading.Thread(target=self._watch, name="overlap_train between nodes", daemon=True).start()

    def _connect(self, device: torch.device, sms: int, store: dist.Store) -> Any:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # before the products' next wave of CTAs
        options.config.max_ctas = sms
        # In clusters of four, as NCCL's kernels come by themselves, they would wait for four free SMs of one GPC. A kernel that
        # waits for them leaves some anywhere.
        options.config.cga_cluster_size = 1
        # torch's watchdog ends the process: ours comes first
        options._timeout = timedelta(seconds=2 * self._timeout_s + _QUEUED_S)
        with bounded(CONNECT, self._callers):  # NCCL's rendezvous has no limit
            group = dist.ProcessGroupNCCL(store, self._topology.node, self._topology.nodes, options)
            try:
                group.eager_connect_single_device(device)
            except Exception:
                group.abort()
                raise
        return group

    def start(self, exchange: Exchange) -> None:
        """Enqueue a send to the rail peer in the node of `sent.target`, and a receive from `received.source`, as one group."""
        if self._ended.is_set():
            self._fault.check()
        local, group, ready, exchanged = self._topology.local, self._group, torch.cuda.Event(), exchange.exchanged
        ready.record()
        group._start_coalescing()
        for out, into in pieces_of(exchange):
            if out.numel():
                group.send([out], exchanged.sent.target // local, 0)
                group.recv([into], exchanged.received.source // local, 0)
        exchange.work = NcclExchange(group._end_coalescing(), exchanged, ready)
        self._under_way.append(exchange.work)

    def _watch(self) -> None:
        leave_captures_alone()
        while not self._ended.wait(_LOOK_S):
            with contextlib.suppress(RuntimeError):  # CUDA's own errors are reported to whoever synchronises
                while self._under_way and self._under_way[0].is_done():
                    self._under_way.popleft()
            if self._under_way and self._under_way[0].is_late(self._timeout_s):
                with contextlib.suppress(RuntimeError):  # this failure, or an earlier one
                    self._fault.keep(self._late(self._under_way[0].exchanged))
            if self._fault.failed:
                self.close(orderly=False)

    def _late(self, exchanged: SendRecv) -> OverlapTimeoutError:
        topology, source = self._topology, exchanged.received.source
        target = topology.receiver(exchanged.sent.target)
        return OverlapTimeoutError(
            f"rank {topology.rank} of node {topology.node} waited {self._timeout_s:g} s to send to rank {target} of node "
            f"{target // topology.local} and to receive from rank {source} of node {source // topology.local}, by NCCL. One of "
            f"them is dead, stopped or in another operator, or the network between the nodes is down; if it is only slow, raise "
            f"timeout_s (--overlap-train-timeout-s)"
        )

    def close(self, orderly: bool) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        if orderly:
            with bounded("overlap_train: disconnect the nodes of the group", self._callers):
                self._group.shutdown()
        else:
            self._group.abort()
