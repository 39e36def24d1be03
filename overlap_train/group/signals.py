"""Signals: which call a word belongs to, and the errors that name what was waited for.

    word = epoch << 32 | fingerprint        kernels/signal.py has the same on the device

A peer that skipped a call, swapped two or has another length sends another fingerprint. The wait sees that and names both calls.
A wait on the host raises from its polling loop. A wait on the GPU fails inside its kernel, leaves a record in pinned memory and
lets the kernel run out (its outputs are NaN); the next operator call of the rank, or `check`, raises from the record.
"""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import torch

from ..kernels.signal_words import (
    EPOCH_SHIFT,
    FAULT_EXPECTED,
    FAULT_SEEN,
    FAULT_SET,
    FAULT_WORD,
    FAULT_WORDS,
    HOST_ABORT,
    LATE_ELAPSED,
    LATE_EXPECTED,
    LATE_WORD,
    MAX_CHUNKS,
)
from ..ranks.agreement import Agreement
from ..ranks.peers import (
    FAILED,
    LOOK_S,
    RAISED,
    OverlapMismatchError,
    OverlapTimeoutError,
    warn_after,
)
from ..warn import warn_user

_EPOCH = 1 << EPOCH_SHIFT
_WORD, _SIGN = 1 << 64, 1 << 63
_Error = OverlapTimeoutError | OverlapMismatchError


@dataclass(frozen=True)
class Tag:
    """One call as ranks tell it from others.

    op: the linear's name and its pass, "decoder.layers.0.mlp.linear_fc1/fprop". what: operator, shapes and dtype, in words.
    """

    op: str
    what: str

    @cached_property
    def fingerprint(self) -> int:
        return zlib.crc32(f"{self.op}|{self.what}".encode())

    @cached_property
    def word(self) -> int:
        """One epoch plus the fingerprint: what the slot's epoch grows by."""
        return _EPOCH + self.fingerprint

    @cached_property
    def barrier(self) -> Tag:
        """The tag of the barrier before this call."""
        return Tag(f"{self.op}/barrier", "barrier")

    def __str__(self) -> str:
        return f"{self.op} [{self.what}]"


def next_word(word: int, tag: Tag) -> int:
    """The signal of a slot's next call, as a signed int64."""
    return ((word >> EPOCH_SHIFT << EPOCH_SHIFT) + tag.word + _SIGN) % _WORD - _SIGN


def epoch_of(word: int) -> int:
    return word >> EPOCH_SHIFT


def fingerprint_of(word: int) -> int:
    return word & (_EPOCH - 1)


def has_arrived(seen: int, expected: int) -> bool:
    """Whether a signal is of the expected epoch or a later one, also where the epoch has wrapped around in between."""
    return not (seen - (expected >> EPOCH_SHIFT << EPOCH_SHIFT)) & _SIGN


def is_same_call(seen: int, expected: int) -> bool:
    """Whether a signal that has arrived is of the same call. A later epoch is: a peer may be one barrier ahead."""
    return seen == expected or epoch_of(seen) != epoch_of(expected)


TURN_S = 5e-4  # between two looks of a rank that waits on the host


def poll(
    ready: Callable[[], bool],
    timeout_s: float,
    pause: Callable[[float], None] = time.sleep,
    late: Callable[[float], None] = lambda waited: None,
    turn_s: float = TURN_S,
) -> bool:
    """Call `ready` until it is true (returns True) or `timeout_s` seconds have passed (returns False). Calls `late` four times a
    second with the seconds so far. Sleeps 0 at first, then `turn_s` a turn: the processes of ranks may share few cores."""
    begin, look_at, turns = time.monotonic(), min(LOOK_S, timeout_s / 10), 0
    while not ready():
        waited = time.monotonic() - begin
        if waited > timeout_s:
            return False
        if waited > look_at:
            look_at = waited + LOOK_S
            late(waited)
        pause(0.0 if turns < 20 else turn_s)
        turns += 1
    return True


class FaultRecord:
    """The first wait of this rank that failed, wherever it happened; `check` raises it, once and ever after.

    `abort` is the device flag that ends all other waits of the rank. `record` is host-visible (pinned on GPUs): reading it
    costs the host a load and no synchronisation.
    """

    def __init__(self, device: torch.device, rank: int, timeout_s: float) -> None:
        on_gpu = device.type == "cuda"
        self._rank, self._timeout_s = rank, timeout_s
        self.abort = torch.zeros(1, dtype=torch.int64, device=device)
        self.record = torch.zeros(FAULT_WORDS, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self.words = memoryview(self.record.numpy())  # read in half the time that numpy takes
        # By fingerprint, while a plan or a slot holds them: with ever new lengths there is no end of tags.
        self._tags: weakref.WeakValueDictionary[int, Tag] = weakref.WeakValueDictionary()
        self.error: _Error | None = None
        self.agreement: Agreement | None = None  # with the peers; set by the domain
        self.begun = 0  # operators of this rank
        self._warned = 0  # the word of the last wait of which a warning was given
        self._doubted = 0  # the word of the wait that the last look found hopeless
        # For faults that no wait finds; a thread calls them every LOOK_S seconds.
        self.looks: list[Callable[[], None]] = []
        self.link_of: Callable[[int], str] = lambda peer: ""  # how a rank's chunks come here, where not all come alike
        if on_gpu:
            threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True).start()

    def register(self, tag: Tag) -> None:
        """Let errors name this call."""
        self._tags[tag.fingerprint] = tag

    def fail(self, peer: int, chunk: int, expected: int, seen: int) -> NoReturn:
        """Raise OverlapTimeoutError, or OverlapMismatchError, for a wait that failed. expected, seen: words as of a signal."""
        self.keep(self._error_of(peer, chunk, expected, seen))

    def note(self, peer: int, chunk: int, expected: int, seen: int) -> None:
        """Say what `fail` would raise, once, and let `check` raise it: the host may be blocked, and never come to raise it."""
        if self.error is None:
            self.error = self._error_of(peer, chunk, expected, seen)
            warn_user(str(self.error))

    @property
    def failed(self) -> bool:
        """Whether a wait has failed, on the device or on the host, perhaps of another thread of this rank."""
        return self.error is not None or bool(self.words[FAULT_SET])

    def keep(self, error: _Error) -> NoReturn:
        """Raise an error; `check` does so from now on. If there was one before, that."""
        self.error = self.error or error
        raise self.error

    def check(self) -> None:
        """Raise if any wait of this rank has failed: slots and epochs are undefined from then on."""
        if self.error is not None:
            # The traceback would keep the frames, and their tensors, of all earlier raises.
            raise self.error.with_traceback(None)
        words = self.words
        if words[FAULT_SET]:
            peer, chunk = divmod(int(words[FAULT_WORD]), MAX_CHUNKS)
            self.fail(peer, chunk, int(words[FAULT_EXPECTED]), int(words[FAULT_SEEN]))

    def tell(self, error: BaseException, call: str, begun: bool = True) -> None:
        """Let the peers hear of an error in an operator of this rank. begun: False while ranks are still to agree on it."""
        if self.agreement is not None:
            self.agreement.peers.tell(error, call, RAISED if self.error is None else FAILED, begun)

    def late(self, peer: int, chunk: int, expected: int, waited: float) -> None:
        """Raise if the peer for which this rank waits will not come; warn once if it is late. Called again and again. Not at
        the first sign of it: what the peer sent last, before it ended, may just be arriving, and then ends the wait."""
        error = None if self.agreement is None else self._hopeless(self.agreement, peer, expected)
        before, self._doubted = self._doubted, 0 if error is None else expected
        if error is not None and before == expected:
            self.keep(error)
        if waited >= warn_after(self._timeout_s) and self._warned != expected:
            self._warned = expected
            warn_user(
                f"{self._name_of(expected)}: rank {self._rank} has waited {waited:.3g} s for chunk {chunk} of rank {peer}; it "
                f"gives up after timeout_s={self._timeout_s:g}"
            )

    def _hopeless(self, agreement: Agreement, peer: int, expected: int) -> _Error | None:
        """Why nobody need wait for a peer: it, or another rank, has raised or ended; or it wants to agree on another call, and
        sends nothing before that. None: it may come."""
        where = f"{self._name_of(expected)}: rank {self._rank}"
        error: _Error | None = agreement.peers.error(where, (peer,))
        if error is not None or (asked := agreement.asked_by(peer)) is None:
            return error
        mine = self._tags.get(fingerprint_of(expected)) or "an operator"
        return OverlapMismatchError(
            f"{where} is in {mine}, but rank {peer} is in: {asked}; all ranks of a group "
            f"must make the same calls, with the same shapes and trained operands, in the same order"
        )

    def look_at_device(self, seen: int) -> int:
        """What `late` does, for a wait on the device, which then ends. seen: the note of the last look; returns that of this."""
        elapsed = int(self.words[LATE_ELAPSED])
        if elapsed != seen:
            peer, chunk = divmod(int(self.words[LATE_WORD]), MAX_CHUNKS)
            try:
                self.late(peer, chunk, int(self.words[LATE_EXPECTED]), elapsed * 1e-9)
            except (OverlapTimeoutError, OverlapMismatchError) as error:
                warn_user(str(error))  # the host may be blocked, and never come to raise it
                self.words[HOST_ABORT] = 1
        return elapsed

    def _error_of(self, peer: int, chunk: int, expected: int, seen: int) -> _Error:
        op = self._name_of(expected)
        if has_arrived(seen, expected):
            mine, theirs = (self._tags.get(fingerprint_of(word)) for word in (expected, seen))
            return OverlapMismatchError(
                f"{op}: rank {self._rank} is in {mine}, but rank {peer} is in {theirs or 'a call that this rank has not made'} "
                f"here; all ranks of a group must make the same calls, with the same shapes, in the same order; where "
                f"numbers of rows differ, which only experts take, pad them to the largest"
            )
        return OverlapTimeoutError(
            f"{op}: rank {self._rank} waited {self._timeout_s:g} s for chunk {chunk} of rank {peer}{self.link_of(peer)}: "
            f"expected epoch {epoch_of(expected)}, seen {epoch_of(seen)}. Rank {peer} is dead, stopped, or in another operator; "
            f"if it is only slow, raise timeout_s (--overlap-train-timeout-s)."
        )

    def _name_of(self, word: int) -> str:
        tag = self._tags.get(fingerprint_of(word))
        return "an operator" if tag is None else tag.op


def _watch(reference: weakref.ref[FaultRecord]) -> None:
    """A thread: the host may be blocked in a synchronisation while a kernel waits, so nobody else would say what is wrong."""
    seen = 0
    while True:
        time.sleep(LOOK_S)
        fault = reference()
        if fault is None:
            return
        seen = fault.look_at_device(seen)
        for look in fault.looks:
            look()
        del fault
