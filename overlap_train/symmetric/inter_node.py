"""Carries data between nodes: a piece and its signal go into the memory of one rank of another node.

One small protocol, made for the strictest transport: pieces to one rank arrive in order, each before its signal, and a source may
be used again when `join` has returned. gloo, for CPU processes, does that (GlooTransport). On GPUs what waits is a
stream. NCCL's receiver must say what it expects (StreamTransport, nccl.py), NVSHMEM's need not (PutTransport, puts.py).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from ..planning.schedule import Crossing, Topology
from .agreement import Agreement, OverlapTimeoutError

_CONNECT = "overlap_train: connect the nodes of the group"
_HEADER, _DATA = 0, 1  # tags of messages
_GOODBYE = -1  # as a number of bytes
_FOREVER = timedelta(days=365)  # how long a receiver waits for the next piece: between two calls any time may pass
_CLOSE_S = 5.0


@dataclass(frozen=True)
class Place:
    """The place of a piece: it goes to `receiver`, which puts it into the heap of `rank` at byte `data`, then its signal at byte
    `signal`.

    receiver: of equal local rank. rank: itself, or another one of its node, whose memory it maps.
    """

    receiver: int
    rank: int
    data: int
    signal: int


class Transport(Protocol):
    """What carries pieces to the ranks with the same local rank in other nodes."""

    def attach(self, heaps: Mapping[int, torch.Tensor]) -> None:
        """From now on put what peers send into these heaps (uint8) of the ranks of this node. Nobody puts anything meanwhile."""
        ...

    def put(self, source: torch.Tensor, place: Place, word: int) -> None:
        """Enqueue `source`, then the signal `word`, and return."""
        ...

    def join(self) -> None:
        """Return when all sources are free again.

        Raises:
            OverlapTimeoutError: they are not in time, or the connection is lost.
        """
        ...

    def close(self, orderly: bool) -> None:
        """End. orderly: the peers do the same, and nothing is under way."""
        ...


@dataclass(frozen=True)
class Piece:
    """Data, contiguous and perhaps none, and the word that becomes their signal, int64 [1]; both in memory of the GPU."""

    data: torch.Tensor
    word: torch.Tensor


class Exchange(Protocol):
    """A piece that is sent, and one that is received, under way."""

    def arrive(self) -> None:
        """Hold the current stream until the received piece is there, and until the one sent may be written over."""
        ...


class StreamTransport(Protocol):
    """What carries pieces between twins in streams of GPUs. Twins start their exchanges in the same order, so NCCL may carry
    them: one group each.

    sms: that its kernels hold while something is under way.
    """

    sms: int

    def exchange(self, crossing: Crossing, sent: Piece, received: Piece) -> Exchange:
        """Enqueue a send to the twin in the node of `crossing.sent.target`, and a receive from `crossing.received.source`, after
        what the current stream has been given so far. It waits for nothing that comes after it in this rank's order of
        exchanges."""
        ...

    def close(self, orderly: bool) -> None:
        """End. orderly: the peers do the same, and nothing is under way; else what is under way ends at once."""
        ...


class PutTransport(Protocol):
    """What carries pieces between GPUs where only the sender acts: nobody has to say what it expects.

    sms: that its kernels hold while something is under way.
    """

    sms: int

    def attach(self, memory: torch.Tensor, staging: int) -> None:
        """Take the group's heap, as this rank has it (uint8); from byte `staging` on it may be used to send from. Collective."""
        ...

    def put(self, source: torch.Tensor, place: Place, word: int, stream: int) -> None:
        """Enqueue `source`, contiguous and perhaps empty, then the signal `word`, into the memory of `place.rank`. What comes
        after it in the stream may write over the source."""
        ...

    def close(self, orderly: bool) -> None:
        """End."""
        ...


class Failures(Protocol):
    """What a transport tells of, and asks: this rank's record of waits that have failed."""

    @property
    def failed(self) -> bool: ...

    def keep(self, error: OverlapTimeoutError) -> NoReturn: ...

    def check(self) -> None: ...


class GlooTransport:
    """gloo's send and receive, in a process group of the twins of this rank. A thread for each twin receives what it puts.

    A piece is a header (place, bytes, word) and its data, received into its place itself; then the thread stores the word
    (rule 1). The place may be in the heap of another rank of this node, which so needs no connection of its own to the sender.
    """

    def __init__(self, agreement: Agreement, topology: Topology, timeout_s: float) -> None:
        self._topology, self._timeout_s = topology, timeout_s
        self._lock = threading.Lock()  # two threads of this rank put: header and data of a piece stay together
        self._under_way: list[tuple[Any, int, torch.Tensor]] = []  # (work, rank, what is sent)
        self._lost: OverlapTimeoutError | None = None
        self._heaps: Mapping[int, torch.Tensor] = {}
        self._group, error = self._connect(agreement)
        agreement.all_succeed(error, _CONNECT)
        far = [node for node in range(topology.nodes) if node != topology.node]
        self._receivers = [threading.Thread(target=self._receive, args=(node,), daemon=True) for node in far]
        for receiver in self._receivers:
            receiver.start()

    def _connect(self, agreement: Agreement) -> tuple[Any, str | None]:
        topology = self._topology
        store = agreement.store_of(f"network/{topology.rank % topology.local}")
        try:
            limit = timedelta(seconds=self._timeout_s)
            return dist.ProcessGroupGloo(store, topology.node, topology.nodes, limit), None
        except RuntimeError as failure:
            first = str(failure).splitlines()[0]
            return None, f"gloo could not connect it with its peers in other nodes ({first}); see GLOO_SOCKET_IFNAME"

    def attach(self, heaps: Mapping[int, torch.Tensor]) -> None:
        self._heaps = heaps

    def put(self, source: torch.Tensor, place: Place, word: int) -> None:
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
        if self._lost is not None:
            raise self._lost
        for work, target, _ in self._under_way:
            try:
                work.wait(timedelta(seconds=self._timeout_s))
            except RuntimeError as failure:
                raise self._loss(target, failure) from None
        self._under_way.clear()

    def _loss(self, target: int, failure: RuntimeError) -> OverlapTimeoutError:
        """What is under way stays there: gloo may still read it."""
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
        if not orderly or self._lost is not None:
            return  # the receivers end with their connections, at the latest with this process
        goodbye = torch.tensor([0, 0, _GOODBYE, 0, 0], dtype=torch.int64)
        for node in range(self._topology.nodes):
            if node != self._topology.node:
                self._send(goodbye, self._topology.twin(node), _HEADER)
        self.join()  # first: a peer that has heard everything may end, and gloo would call what has been sent lost
        for receiver in self._receivers:
            receiver.join(_CLOSE_S)
