"""gloo between the CPU processes of different nodes: threads write what rail peers send into the heaps of a node."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..group.copy_engine import HostCopyEngine, Worker, run_push
from ..group.signals import FaultRecord
from ..schedule.inter_node import SendRecv
from ..schedule.order import Topology
from ..symmetric.agreement import Agreement, OverlapTimeoutError
from .engines import Exchange, InterNodeEngine, connect_rail_peers
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
        limit = timedelta(seconds=timeout_s)

        def connect(store: dist.Store) -> Any:
            return dist.ProcessGroupGloo(store, topology.node, topology.nodes, limit)

        self._group = connect_rail_peers(agreement, topology, "gloo", connect, lambda group: None)
        far = [node for node in range(topology.nodes) if node != topology.node]
        self._receivers = [threading.Thread(target=self._receive, args=(node,), daemon=True) for node in far]
        for receiver in self._receivers:
            receiver.start()

    def attach(self, heaps: Mapping[int, torch.Tensor]) -> None:
        """From now on write what peers send into these heaps (uint8) of the ranks of this node. No peer sends meanwhile."""
        self._heaps = heaps

    def put(self, source: torch.Tensor, place: Place, word: int) -> None:
        """Enqueue `source`, then the signal `word`, and return."""
        data = source.detach().reshape(-1).view(torch.uint8)
        header = torch.tensor([place.rank, place.data, data.numel(), place.signal, word], dtype=torch.int64)
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
        header = torch.empty(5, dtype=torch.int64)
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
        goodbye = torch.tensor([0, 0, _GOODBYE, 0, 0], dtype=torch.int64)
        for node in range(self._topology.nodes):
            if node != self._topology.node:
                self._send(goodbye, self._topology.rail_peer(node), _HEADER)
        self.join()  # first: a peer that has heard everything may end, and gloo would call what has been sent lost
        for receiver in self._receivers:
            receiver.join(_CLOSE_S)


class HostEngine(HostCopyEngine, InterNodeEngine):
    """The engine of CPU processes. What the caller has computed is there, so nothing has to be ordered after it."""

    network: GlooTransport

    def __init__(self, timeout_s: float, network: GlooTransport, fault: FaultRecord) -> None:
        HostCopyEngine.__init__(self, timeout_s)
        InterNodeEngine.__init__(self)
        self.network, self._fault = network, fault
        self.sending, self.arriving = Worker("sending between nodes"), Worker("arriving between nodes")

    def start_exchange(self, exchange: Exchange) -> None:
        call, make = exchange.call, exchange.make
        put = partial(self.network.put, exchange.source, call.place(exchange.exchanged.sent), call.word)
        if make is None:
            put()  # gloo returns at once
        else:
            self.sending.run(partial(_one_after_the_other, make, put))

    def arrive(self, exchange: Exchange) -> None:
        if exchange.exchanged.passes_on:
            self.arriving.run(partial(self._pass_on, exchange.call, exchange.exchanged))

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
