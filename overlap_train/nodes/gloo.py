"""gloo between the CPU processes of different nodes: threads write what rail peers send into the heaps of a node."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..schedule.order import Topology
from ..symmetric.agreement import Agreement, OverlapTimeoutError
from .transport import CONNECT, Place

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
                self._send(goodbye, self._topology.twin(node), _HEADER)
        self.join()  # first: a peer that has heard everything may end, and gloo would call what has been sent lost
        for receiver in self._receivers:
            receiver.join(_CLOSE_S)
