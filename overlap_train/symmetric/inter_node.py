"""What carries data between nodes: a piece, and after it its signal, goes into the memory of one rank of another node.

Pieces to one rank arrive in order, each before its signal. There are three protocols, one a transport:

    Transport        gloo.py   CPU processes: the host waits until its sources are free again (`join`)
    StreamTransport  nccl.py   GPUs: a stream waits, and the receiver says what it expects
    PutTransport     puts.py   GPUs: a stream waits, and only the sender acts
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch

from ..planning.schedule.crossings import Crossing
from .agreement import OverlapTimeoutError

CONNECT = "overlap_train: connect the nodes of the group"  # what ranks do while a transport is made, for errors


@dataclass(frozen=True)
class Place:
    """Where a piece goes: `receiver` writes it into the heap of `rank` at byte `data`, and then its signal at byte `signal`.

    receiver: the sender's twin. rank: the receiver itself, or another rank of its node, whose memory it maps.
    """

    receiver: int
    rank: int
    data: int
    signal: int


class Transport(Protocol):
    """What carries pieces to the ranks with the same local rank in other nodes."""

    def attach(self, heaps: Mapping[int, torch.Tensor]) -> None:
        """From now on write what peers send into these heaps (uint8) of the ranks of this node. No peer sends meanwhile."""
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
