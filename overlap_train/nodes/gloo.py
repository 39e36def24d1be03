"""gloo between the CPU processes of different nodes: threads write what rail peers send into the heaps of a node."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..group.copy_engine import HostCopyEngine, Route, run_push
from ..group.signals import FaultRecord
from ..ranks.agreement import Agreement, OverlapTimeoutError
from ..schedule.order import Topology
from .engines import Exchange, InterNodeEngine, connect_rail_peers
from .slots import NodeCall, Place

_HEADER, _DATA = 0, 1  # tags of messages
_GOODBYE = -1  # as a number of bytes
_FOREVER = timedelta(days=365)  # how long a receiver waits for the next piece: between two calls any time may pass
_CLOSE_S = 5.0


class GlooTransport:
    """Carries pieces in a process group of this rank and its rail peers. A thread for each of these receives: a header (place,
    bytes, word), the data into their place, which may be in the heap of another rank of this node; then it stores the word (rule
    1)."""

    needs_buffers = False

    def __init__(self, agreement: Agreement, topology: Topology, timeout_s: float, fault: FaultRecord) -> None:
        self._topology, self._limit, self._fault = topology, timedelta(seconds=timeout_s), fault
        self._under_way: list[tuple[Any, int, torch.Tensor]] = []  # (work, rank, what is sent)
        self._heaps: Mapping[int, torch.Tensor] = {}
        self._group = connect_rail_peers(agreement, topology, "gloo", self._connect, lambda group: None)
        self._far = [node for node in range(topology.nodes) if node != topology.node]
        self._receivers = [threading.Thread(target=self._receive, args=(node,), daemon=True) for node in self._far]
        for receiver in self._receivers:
            receiver.start()

    def _connect(self, store: dist.Store) -> Any:
        return dist.ProcessGroupGloo(store, self._topology.node, self._topology.nodes, self._limit)

    def attach(self, heaps: Mapping[int, torch.Tensor]) -> None:
        """From now on write what peers send into these heaps (uint8) of the ranks of this node. No peer sends meanwhile."""
        self._heaps = heaps

    def start(self, exchange: Exchange) -> None:
        self.put(exchange.source, exchange.call.place(exchange.exchanged.sent), exchange.call.word)

    def put(self, source: torch.Tensor, place: Place, word: int) -> None:
        """Enqueue `source`, then the signal `word`. Raises OverlapTimeoutError where the connection is lost."""
        data = source.detach().reshape(-1).view(torch.uint8)
        header = torch.tensor(
            [place.rank, place.data, data.numel(), place.signal, word], dtype=torch.int64, device="cpu"
        )
        self._send(header, place.receiver, _HEADER)
        if data.numel():
            self._send(data, place.receiver, _DATA)

    def _send(self, piece: torch.Tensor, target: int, tag: int) -> None:
        try:
            work = self._group.send([piece], target // self._topology.local, tag)
        except RuntimeError as failure:
            self._fail(target, failure)
        self._under_way.append((work, target, piece))

    def join(self) -> None:
        """Return when all sources are free again. Raises OverlapTimeoutError if they are not in time."""
        for work, target, _ in self._under_way:
            try:
                work.wait(self._limit)
            except RuntimeError as failure:
                self._fail(target, failure)
        self._under_way.clear()

    def _fail(self, target: int, failure: RuntimeError) -> NoReturn:
        """Raise, now and ever after. What is under way stays in the list: gloo may still read it."""
        rank, node, local = self._topology.rank, self._topology.node, self._topology.local
        self._fault.keep(
            OverlapTimeoutError(
                f"rank {rank} of node {node} could not send to rank {target} of node {target // local} over the network within "
                f"{self._limit.total_seconds():g} s ({str(failure).splitlines()[0]}). That rank is dead, stopped or in another "
                f"operator, or the network between the two nodes is down"
            )
        )

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
        if not orderly:
            return  # the receivers end with their connections, at the latest with this process
        goodbye = torch.tensor([0, 0, _GOODBYE, 0, 0], dtype=torch.int64, device="cpu")
        for node in self._far:
            self._send(goodbye, self._topology.rail_peer(node), _HEADER)
        self.join()  # first: a peer that has heard everything may end, and gloo would call what has been sent lost
        for receiver in self._receivers:
            receiver.join(_CLOSE_S)


class HostEngine(HostCopyEngine, InterNodeEngine):
    """The engine of CPU processes. The caller adds up and passes on by itself, in the order of GPUs with one hardware queue."""

    network: GlooTransport

    def __init__(self, timeout_s: float, network: GlooTransport, fault: FaultRecord) -> None:
        HostCopyEngine.__init__(self, timeout_s)
        InterNodeEngine.__init__(self)
        self.network, self._fault = network, fault

    def _in(self, stream: Any) -> AbstractContextManager[None]:
        self._fault.check()  # or it would wait as long once more
        return nullcontext()

    def _pass_on(self, routes: list[Route], source: torch.Tensor) -> None:
        for route in routes:
            run_push(route.push(source))

    @staticmethod
    def add(
        call: NodeCall, own: torch.Tensor, received: torch.Tensor, order: list[int], y: torch.Tensor, sms: int = 0
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
            if not is_ahead:
                self.finish_started()
        finally:
            super().join()
        if not self._fault.failed:  # else what is under way may never arrive
            self.network.join()

    def close(self) -> None:
        self.network.close(orderly=not self._fault.failed)
        super().close()
