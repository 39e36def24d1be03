"""Bounded waits: the error that names what was waited for, on the host and on the device.

A wait on the host raises from the polling loop. A wait on the GPU gives up inside its kernel, leaves a record in pinned memory
and lets the kernel run out (its outputs are NaN); the next operator call of the rank, or `check`, raises from the record.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
import torch

from ..kernels.signal_words import FAULT_EXPECTED, FAULT_SEEN, FAULT_SET, FAULT_TAG, FAULT_WORD, FAULT_WORDS, MAX_CHUNKS


class OverlapTimeoutError(RuntimeError):
    """A peer's chunk did not arrive within `OverlapConfig.timeout_s` seconds."""


@dataclass(frozen=True)
class Waiting:
    """What a wait is for, in words: enough to find the rank at fault."""

    op: str
    rank: int
    peer: int
    chunk: int
    timeout_s: float

    def error(self, expected: int, seen: int) -> OverlapTimeoutError:
        return OverlapTimeoutError(
            f"{self.op}: rank {self.rank} waited {self.timeout_s:g} s for chunk {self.chunk} of rank {self.peer}: expected "
            f"epoch {expected}, seen {seen}. Rank {self.peer} is dead, stopped, or in another operator; if it is only slow, "
            f"raise timeout_s (--overlap-train-timeout-s)."
        )


def poll(ready: Callable[[], bool], timeout_s: float, pause: Callable[[float], None] = time.sleep) -> bool:
    """Call `ready` until it is true (returns True) or `timeout_s` seconds have passed (returns False).

    Sleeps 0 at first, then 50 microseconds a turn: two ranks and their copy threads may share two cores.
    """
    deadline = time.monotonic() + timeout_s
    turns = 0
    while not ready():
        if time.monotonic() > deadline:
            return False
        pause(0.0 if turns < 100 else 5e-5)
        turns += 1
    return True


class FaultRecord:
    """The first wait of this rank that gave up, wherever it happened; `check` raises it, once and ever after.

    `abort` is the device flag that ends all other waits of the rank; `record` is host-visible (pinned on GPUs), so that reading
    it costs the host a load and no synchronisation.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.abort = torch.zeros(1, dtype=torch.int64, device=device)
        self.record = torch.zeros(FAULT_WORDS, dtype=torch.int64, pin_memory=on_gpu)
        self._words: np.ndarray = self.record.numpy()
        self._waits: dict[Waiting, int] = {}
        self._error: OverlapTimeoutError | None = None

    def tag(self, waiting: Waiting) -> int:
        """A number by which a kernel names this wait's operator in its report; the kernel adds peer and chunk."""
        return self._waits.setdefault(waiting, len(self._waits))

    def raise_timeout(self, waiting: Waiting, expected: int, seen: int) -> NoReturn:
        """Raise for a wait on the host that gave up."""
        self._error = waiting.error(expected, seen)
        raise self._error

    def check(self) -> None:
        """Raise OverlapTimeoutError if any wait of this rank has given up: slots and epochs are undefined from then on."""
        if self._error is not None:
            raise self._error
        words = self._words
        if words[FAULT_SET]:
            waiting = list(self._waits)[int(words[FAULT_TAG])]
            peer, chunk = divmod(int(words[FAULT_WORD]), MAX_CHUNKS)
            waiting = replace(waiting, peer=peer, chunk=chunk)
            self.raise_timeout(waiting, int(words[FAULT_EXPECTED]), int(words[FAULT_SEEN]))
