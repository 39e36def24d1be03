"""Copies and signals that cost no SM: by the copy engine on GPUs (copy_stream.py), by a thread on the CPU (copy_thread.py).

A push is a copy into a peer's memory followed by its signal (rule 1: data first, then the signal). A pull is a copy out of a
peer's memory, after a barrier: the peer has put there what is copied. Both engines work through these in the order in which they
were enqueued. Where pushes go does not change from call to call: a `Route` is worked out once, and a call only adds the source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Push:
    """Copy `source` into `target`, then `epoch` into `signal`.

    source, target: same shape and dtype, contiguous; target lies in a peer's memory.
    signal: int64 [1] in the peer's memory, written by this rank alone. epoch: int64 [1], this rank's own.
    after: (counter int64 [1], goal): do not start before the counter has reached the goal; None: start at once.
    """

    source: torch.Tensor
    target: torch.Tensor
    signal: torch.Tensor
    epoch: torch.Tensor
    after: tuple[torch.Tensor, int] | None = None


@dataclass(frozen=True)
class Pull:
    """Copy `source`, which lies in a peer's memory, into `target`: same shape and dtype, contiguous."""

    source: torch.Tensor
    target: torch.Tensor


class Route:
    """A push without its source. It takes what lies `first` elements after the source's start, whatever the source's strides.

    target, signal, epoch, after: see Push.
    """

    def __init__(
        self, first: int, target: torch.Tensor, signal: torch.Tensor, epoch: torch.Tensor,
        after: tuple[torch.Tensor, int] | None,
    ) -> None:  # fmt: skip
        self.first, self.target, self.signal, self.epoch, self.after = first, target, signal, epoch, after
        # the same in bytes and addresses, for the driver
        self.offset, self.nbytes, self.place = first * target.element_size(), target.nbytes, target.data_ptr()
        self.signal_at, self.epoch_at = signal.data_ptr(), epoch.data_ptr()
        self.counter_at = 0 if after is None else after[0].data_ptr()
        self.goal = 0 if after is None else after[1]

    def push(self, source: torch.Tensor) -> Push:
        """The push of this route from `source`, which may have any shape; what is taken of it is contiguous."""
        start, shape = source.storage_offset() + self.first, self.target.shape
        part = source.as_strided((self.target.numel(),), (1,), start).view(shape)
        return Push(part, self.target, self.signal, self.epoch, self.after)


class CopyEngine(Protocol):
    """What operators need of a copy engine. `begin` .. `join` bracket one operator's pushes and pulls."""

    def begin(self) -> None:
        """Let the caller's stream wait for the previous operator, which may have run in another stream."""
        ...

    def push(self, source: torch.Tensor, routes: list[Route]) -> None:
        """Enqueue pushes of what the caller's stream has written into `source` so far, and return."""
        ...

    def launch(self, kernel: Callable[[], None], source: torch.Tensor, routes: list[Route]) -> None:
        """Launch a kernel that writes `source` and counts what the pushes wait for (`Route.after`), and enqueue them."""
        ...

    def pull(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Enqueue copies of what lies at peers, once the caller's stream has come here. `join` waits for them, too."""
        ...

    def keep(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Enqueue a copy within this rank's memory behind what is pushed. Both are contiguous.

        This operator has pushed from `source` before. That push ordered the copy behind what the caller's stream had enqueued by
        then, and it keeps `source` alive until `join`.
        """
        ...

    def wait_kept(self) -> None:
        """The caller's stream goes on only when what was to be kept last is copied."""
        ...

    def begin_ahead(self) -> None:
        """What is pushed or pulled from here on is the next operator's. The next `join` need not wait for it."""
        ...

    def join(self) -> None:
        """The caller's stream goes on only when all pushes and pulls are done; the sources of pushes may be reused."""
        ...

    def close(self) -> None:
        """Finish what is enqueued and end."""
        ...
