"""gloo between the CPU processes of different nodes: threads write what rail peers send into the heaps of a node."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..group.copy_engine import HostCopyEngine, Route, run_push
from ..group.signals import FaultRecord
from ..schedule.inter_node import SendRecv
from ..schedule.order import Topology
from ..symmetric.agreement import Agreement, OverlapTimeoutError
from .engines import CONNECT, Exchange, InterNodeEngine, Put
from .slots import NodeCall, Place

_HEADER, _DATA = 0, 1  # tags of messages
_GOODBYE = -1  # as a number of bytes
_FOREVER = timedelta(days=365)  # how long a receiver waits for the next piece: between two calls any time may pass
_CLOSE_S = 5.0


class GlooTransport:
    """Carries pieces by gloo's send and receive, in a process group of this rank and its rail peers. A thread for each receives.

    A piece is a header (place, bytes, word) and its data. The thread receives the data into their place, and then stores the word
    (rule 1). The place may be in the heap of another rank of this node: that rank needs no connection of its own to the sender.
    """

    sms = 0  # that its kernels hold: there are none

    def __init__(self, agreement: Agreement, topology: Topology, timeout_s: float) -> None:
        self._topology, self._timeout_s = topology, timeout_s
        self._lock = threading.Lock()  # two threads of this rank put: header and data of a piece stay together
        self._under_way: list[tuple[Any, int, torch.Tensor]] = []  # (work, rank, what is sent)
        self._lost: OverlapTimeoutError | None = None
        self._heaps: Mapping[int, torch.Tensor] = {}
        agreement.barrier(CONNECT)  # counted in the name of the store: ranks that try again meet in a new one
        self._group: Any = None
        error = self._connect(agreement)
        try:
            agreement.all_succeed(error, CONNECT)
        except RuntimeError:
            self._group = None  # ends it, although who catches the error may hold this object
            raise
        far = [node for node in range(topology.nodes) if node != topology.node]
        self._receivers = [threading.Thread(target=self._receive, args=(node,), daemon=True) for node in far]
        for receiver in self._receivers:
            receiver.start()

    def _connect(self, agreement: Agreement) -> str | None:
        """Why not, or None."""
        topology = self._topology
        # Of no other group: one that could not be connected has left its addresses behind.
        store = agreement.store_of(agreement.name_of(f"network/{topology.rank % topology.local}"))
        try:
            limit = timedelta(seconds=self._timeout_s)
            self._group = dist.ProcessGroupGloo(store, topology.node, topology.nodes, limit)
            return None
        except Exception as failure:  # its peers wait to hear of it
            first = str(failure).splitlines()[0]
            return f"gloo could not connect it with its peers in other nodes ({first}); see GLOO_SOCKET_IFNAME"

    def attach(self, heaps: Mapping[int, torch.Tensor]) -> None:
        """From now on write what peers send into these heaps (uint8) of the ranks of this node. No peer sends meanwhile."""
        self._heaps = heaps

    def put(self, source: torch.Tensor, place: Place, word: int) -> None:
        """Enqueue `source`, then the signal `word`, and return."""
        data = source.detach().reshape(-1).view(torch.uint8)
        header = torch.tensor(
            [place.rank, place.data, data.numel(), place.signal, word], dtype=torch.int64, device="cpu"
        )
        with self._lock:
            self._send(header, place.receiver, _HEADER)
            if data.numel():
                self._send(data, place.receiver, _DATA)

    def _send(self, piece: torch.Tensor, target: int, tag: int) -> None:
        try:
            work = self._group.send([piece], target // self._topology.local, tag)
        except RuntimeError as failure:
            raise self._loss(target, failure) from None
        self._under_way.append((work, target, piece))

    def join(self) -> None:
        """Return when all sources are free again.

        Raises:
            OverlapTimeoutError: they are not in time, or the connection is lost.
        """
        if self._lost is not None:
            raise self._lost
        for work, target, _ in self._under_way:
            try:
                work.wait(timedelta(seconds=self._timeout_s))
            except RuntimeError as failure:
                raise self._loss(target, failure) from None
        self._under_way.clear()

    def _loss(self, target: int, failure: RuntimeError) -> OverlapTimeoutError:
        """The error of a send that failed. What is under way stays in the list: gloo may still read it."""
        topology = self._topology
        self._lost = OverlapTimeoutError(
            f"rank {topology.rank} of node {topology.node} could not send to rank {target} of node {target // topology.local} "
            f"over the network within {self._timeout_s:g} s ({str(failure).splitlines()[0]}). That rank is dead, stopped or in "
            f"another operator, or the network between the two nodes is down"
        )
        return self._lost

    def _receive(self, node: int) -> None:
        """A thread: ends with the connection, or when the peer says goodbye. Whoever waits for a piece has a time limit."""
        header = torch.empty(5, dtype=torch.int64, device="cpu")
        try:
            while True:
                self._group.recv([header], node, _HEADER).wait(_FOREVER)
                rank, data, nbytes, signal, word = header.tolist()
                if nbytes == _GOODBYE:
                    return
                heap = self._heaps[rank]
                if nbytes:
                    self._group.recv([heap[data : data + nbytes]], node, _DATA).wait(_FOREVER)
                heap[signal : signal + 8].view(torch.int64)[0] = word
        except RuntimeError:
            return

    def close(self, orderly: bool) -> None:
        """End. orderly: the peers do the same, and nothing is under way."""
        if not orderly or self._lost is not None:
            return  # the receivers end with their connections, at the latest with this process
        goodbye = torch.tensor([0, 0, _GOODBYE, 0, 0], dtype=torch.int64, device="cpu")
        for node in range(self._topology.nodes):
            if node != self._topology.node:
                self._send(goodbye, self._topology.rail_peer(node), _HEADER)
        self.join()  # first: a peer that has heard everything may end, and gloo would call what has been sent lost
        for receiver in self._receivers:
            receiver.join(_CLOSE_S)


class Worker:
    """A daemon thread that runs what it is given, in that order, and skips the rest after a failure."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending = 0
        self._error: Exception | None = None
        self._idle = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=f"overlap_train {name} between nodes", daemon=True)
        self._thread.start()

    def run(self, task: Callable[[], None]) -> None:
        """Enqueue it, and return."""
        with self._idle:
            self._pending += 1
        self._queue.put(task)

    @torch.no_grad()  # per thread
    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                if self._error is None:
                    task()
            except Exception as error:  # a thread cannot raise to its owner: join does
                self._error = error
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()

    def join(self) -> None:
        """Return when everything has run; raises what it raised."""
        with self._idle:
            self._idle.wait_for(lambda: self._pending == 0)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


class HostEngine(HostCopyEngine, InterNodeEngine):
    """The engine of CPU processes. What the caller has computed is there, so nothing has to be ordered after it."""

    network: GlooTransport

    def __init__(self, timeout_s: float, network: GlooTransport, fault: FaultRecord) -> None:
        HostCopyEngine.__init__(self, timeout_s)
        InterNodeEngine.__init__(self)
        self.network, self._fault = network, fault
        self.sending, self.arriving = Worker("sending"), Worker("arriving")

    def push_counted(self, source: torch.Tensor, routes: list[Route]) -> None:
        self.push(source, routes)

    def wait_for_tiles(self, counter: torch.Tensor, tiles: int) -> None:
        """An interpreted kernel has stored them all when it returns."""

    def mark(self) -> int:
        return 0

    def send_after(self, mark: int) -> None: ...

    def start_exchange(
        self, call: NodeCall, exchanged: SendRecv, source: torch.Tensor, make: Callable[[], None] | None = None,
        buffer: torch.Tensor | None = None,
    ) -> Exchange:  # fmt: skip
        put = partial(self.network.put, source, call.place(exchanged.sent), call.word)
        if make is None:
            put()  # gloo returns at once
        else:
            self.sending.run(partial(_one_after_the_other, make, put))
        return Put()

    def arrive(
        self, call: NodeCall, exchanged: SendRecv, exchange: Exchange, buffer: torch.Tensor | None = None
    ) -> None:
        if exchanged.passes_on:
            self.arriving.run(partial(self._pass_on, call, exchanged))

    def _pass_on(self, call: NodeCall, exchanged: SendRecv) -> None:
        call.wait_chunk(exchanged.received.fills, exchanged.received.chunk)
        for route in call.routes(exchanged.passed_on):
            run_push(route.push(call.blocks))

    def add(
        self, call: NodeCall, own: torch.Tensor, received: torch.Tensor, order: list[int], y: torch.Tensor, sms: int = 0
    ) -> None:
        total = own.to(torch.float32, copy=True)
        for block in order:
            total += received[block]
        y.copy_(total)

    def barrier(self, call: NodeCall, topology: Topology) -> None:
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        for node in range(topology.nodes):
            if node != topology.node:
                self.network.put(nothing, call.place_of(topology.rail_peer(node), topology.rank, 0), call.word)

    def begin_ahead(self) -> None:
        self.finish_started()
        super().begin_ahead()

    def join(self) -> None:
        is_ahead = self._ahead is not None  # what has been started since is the next operator's
        try:
            with ExitStack() as all_of_it:
                for ended in (self.arriving.join, self.sending.join, super().join):
                    all_of_it.callback(ended)
                if not is_ahead:
                    self.finish_started()
            if not self._fault.failed:  # else what is under way may never arrive
                self.network.join()
        except OverlapTimeoutError as error:  # of a send: by `sending`, or under way
            self._fault.keep(error)

    def close(self) -> None:
        for worker in (self.sending, self.arriving):
            worker.close()
        self.network.close(orderly=not self._fault.failed)
        super().close()


def _one_after_the_other(*tasks: Callable[[], None]) -> None:
    for task in tasks:
        task()
