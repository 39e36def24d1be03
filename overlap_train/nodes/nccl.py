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
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from ..gpu.driver import leave_captures_alone
from ..schedule.inter_node import SendRecv
from ..schedule.order import Topology, Transfer
from ..symmetric.agreement import Agreement, OverlapTimeoutError
from ..symmetric.bounded import bounded
from .engines import CONNECT, Exchange, Piece, StreamEngine
from .slots import NodeCall

_LOOK_S = 0.5
_QUEUED_S = 3600.0  # that an exchange may stand behind other work: torch's watchdog counts from when the host enqueues


class Failures(Protocol):
    """What a transport tells of, and asks: this rank's record of waits that have failed."""

    @property
    def failed(self) -> bool: ...

    def keep(self, error: OverlapTimeoutError) -> NoReturn: ...

    def check(self) -> None: ...


class NcclExchange:
    """One group under way. ready: an event in the stream that sends, after which it may start."""

    def __init__(self, work: Any, exchanged: SendRecv, ready: torch.cuda.Event) -> None:
        self._work, self.exchanged, self._ready = work, exchanged, ready
        self._began: float | None = None

    def arrive(self) -> None:
        """Hold the current stream until the data are there, and until what was sent may be written over."""
        self._work.wait()

    @property
    def done(self) -> bool:
        return self._work.is_completed()

    def is_late(self, timeout_s: float) -> bool:
        """Whether so many seconds have passed since it could start. Asked of the oldest exchange alone: before, the one in front
        of it ran. What the stream had to do before takes as long as it takes, and no rail peer is late for it."""
        if self._began is None and self._may_start():
            self._began = time.monotonic()
        return self._began is not None and time.monotonic() - self._began > timeout_s

    def _may_start(self) -> bool:
        try:
            return self._ready.query()
        except RuntimeError:  # of CUDA, which is reported to whoever synchronises; the time-out holds all the same
            return True


class NcclTransport:
    """A communicator of the rail peers of this rank: nothing else travels in it.

    NCCL waits without end. Therefore a thread watches the oldest exchange, and what the waits of this rank have found. If either
    has failed, it ends the communicator: no stream hangs, and the error that names a rank comes first.

    sms: how many CTAs NCCL may have, each of which holds an SM.
    """

    def __init__(
        self,
        agreement: Agreement,
        topology: Topology,
        device: torch.device,
        timeout_s: float,
        failures: Failures,
        sms: int,
    ) -> None:
        self._topology, self._timeout_s, self._failures, self.sms = topology, timeout_s, failures, sms
        self._under_way: deque[NcclExchange] = deque()
        self._ended = threading.Event()
        self._callers = agreement.callers(range(topology.rank % topology.local, topology.world, topology.local))
        agreement.barrier(CONNECT)
        self._group: Any = None
        error = self._connect(agreement, device)
        try:
            agreement.all_succeed(error, CONNECT)
        except RuntimeError:
            self.close(orderly=False)
            raise
        threading.Thread(target=self._watch, name="overlap_train between nodes", daemon=True).start()

    def _connect(self, agreement: Agreement, device: torch.device) -> str | None:
        """Why not, or None."""
        topology = self._topology
        # Of no other communicator: one that could not be connected has left the id of its NCCL behind.
        store = agreement.store_of(agreement.name_of(f"network/{topology.rank % topology.local}"))
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # before the products' next wave of CTAs
        options.config.max_ctas = self.sms
        # In clusters of four, as NCCL's kernels come by themselves, they would wait for four free SMs of one GPC. A kernel that
        # waits for them leaves some anywhere.
        options.config.cga_cluster_size = 1
        # torch's watchdog ends the process: ours comes first
        options._timeout = timedelta(seconds=2 * self._timeout_s + _QUEUED_S)
        try:
            with bounded(CONNECT, self._callers):  # NCCL's rendezvous has no limit
                self._group = dist.ProcessGroupNCCL(store, topology.node, topology.nodes, options)
                self._group.eager_connect_single_device(device)
            return None
        except Exception as failure:  # its peers wait to hear of it
            first = str(failure).splitlines()[0]
            return f"NCCL could not connect it with its peers in other nodes ({first}); see NCCL_SOCKET_IFNAME"

    def exchange(self, exchanged: SendRecv, sent: Piece, received: Piece) -> NcclExchange:
        """Enqueue a send to the rail peer in the node of `exchanged.sent.target`, and a receive from
        `exchanged.received.source`, after what the current stream has been given so far. They wait for nothing that comes after
        them in this rank's order of exchanges."""
        if self._ended.is_set():
            self._failures.check()
        local, group, ready = self._topology.local, self._group, torch.cuda.Event()
        ready.record()
        group._start_coalescing()
        for out, into in ((sent.data, received.data), (sent.word, received.word)):
            if out.numel():
                group.send([out], exchanged.sent.target // local, 0)
                group.recv([into], exchanged.received.source // local, 0)
        found = NcclExchange(group._end_coalescing(), exchanged, ready)
        self._under_way.append(found)
        return found

    def _watch(self) -> None:
        leave_captures_alone()
        while not self._ended.wait(_LOOK_S):
            with contextlib.suppress(RuntimeError):  # CUDA's own errors are reported to whoever synchronises
                while self._under_way and self._under_way[0].done:
                    self._under_way.popleft()
            if self._under_way and self._under_way[0].is_late(self._timeout_s):
                with contextlib.suppress(RuntimeError):  # this failure, or an earlier one
                    self._failures.keep(self._late(self._under_way[0].exchanged))
            if self._failures.failed:
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
        """End. orderly: the peers do the same, and nothing is under way; else what is under way ends at once."""
        if self._ended.is_set():
            return
        self._ended.set()
        if orderly:
            with bounded("overlap_train: disconnect the nodes of the group", self._callers):
                self._group.shutdown()
        elif self._group is not None:
            self._group.abort()


class NcclEngine(StreamEngine):
    """The engine of GPUs whose data cross the network by NCCL: rail peers exchange, and both take part."""

    needs_buffers = True
    network: NcclTransport

    def _send(self, call: NodeCall, exchanged: SendRecv, source: torch.Tensor, buffer: torch.Tensor | None) -> Exchange:
        received = exchanged.received
        into = call.chunk_of(received.fills, received.chunk) if buffer is None else buffer
        return self.network.exchange(exchanged, Piece(source, call.slot.epoch), Piece(into, call.crossed(received)))

    def arrive(
        self, call: NodeCall, exchanged: SendRecv, exchange: Exchange, buffer: torch.Tensor | None = None
    ) -> None:
        received, passed_on = exchanged.received, exchanged.passed_on
        with self._driver.in_stream(self._arriving):
            exchange.arrive()
            if buffer is None:
                self._signal(call, received)
                if not passed_on.all:
                    return
                # Bounded, and it notices a rail peer that is in another call.
                call.wait_chunk(received.fills, received.chunk)
            self._pass_on(call.routes(passed_on), call.blocks if buffer is None else buffer)

    def _signal(self, call: NodeCall, received: Transfer) -> None:
        signal, word = call.signal_of(received.fills, received.chunk), call.crossed(received)
        self._driver.check(self._driver.copy(signal.data_ptr(), word.data_ptr(), 8, self._arriving.cuda_stream))
