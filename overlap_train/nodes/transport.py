"""What carries data between nodes: a piece, and after it its signal, goes into the memory of one rank of another node.

Pieces to one rank arrive in order, each before its signal. There are three transports:

    gloo.py   CPU processes: the host waits until its sources are free again (`join`)
    nccl.py   GPUs: a stream waits, and the receiver says what it expects
    puts.py   GPUs: a stream waits, and only the sender acts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch

from ..symmetric.agreement import OverlapTimeoutError

CONNECT = "overlap_train: connect the nodes of the group"  # what ranks do while a transport is made, for errors


@dataclass(frozen=True)
class Place:
    """Where a piece goes: `receiver` writes it into the heap of `rank` at byte `data`, and then its signal at byte `signal`.

    receiver: the sender's rail peer. rank: the receiver itself, or another rank of its node, whose memory it maps.
    """

    receiver: int
    rank: int
    data: int
    signal: int


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


class Failures(Protocol):
    """What a transport tells of, and asks: this rank's record of waits that have failed."""

    @property
    def failed(self) -> bool: ...

    def keep(self, error: OverlapTimeoutError) -> NoReturn: ...

    def check(self) -> None: ...
