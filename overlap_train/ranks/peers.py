"""What the ranks of a group tell each other, through its key-value store, when one of them cannot go on.

A rank that raises writes its call and its error. A rank that waits looks for that four times a second, and whether the process
of the awaited rank is still there. Ranks may all raise alike, as where memory runs out, and go on. Therefore a rank gives up a
second after it has heard of an error, and not if it has raised in the same operator itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch.distributed as dist

LOOK_S = 0.25  # from one look to the next
_GRACE_S = 1.0
_ANSWER_S = 1.0

T = TypeVar("T")


class OverlapTimeoutError(RuntimeError):
    """A rank did not do its part within `OverlapConfig.timeout_s` seconds."""


class OverlapMismatchError(RuntimeError):
    """A peer is in another call than this rank: the ranks of a group did not make the same calls in the same order."""


class OverlapPeerError(OverlapTimeoutError):
    """A rank of the group has raised, or its process has ended, so that the others need not wait for it. The text names the rank,
    and quotes its error."""


def answer(ask: Callable[[], T], limit_s: float) -> T:
    """What `ask` returns or raises; TimeoutError after `limit_s` seconds. It runs in a thread of its own, which then is left
    behind: torch 2.11 waited 25 s for a store whose process was stopped, whatever time-out the store had."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(ask())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, name="overlap_train store", daemon=True).start()
    except RuntimeError:  # no thread can be started: none in functions of atexit, from Python 3.12 on
        return ask()
    return future.result(limit_s)


def answer_soon(ask: Callable[[], T]) -> T | None:
    """What `ask` returns; None where the store is gone, or does not answer in a second: no news."""
    with contextlib.suppress(TimeoutError, RuntimeError, ConnectionError):
        return answer(ask, _ANSWER_S)
    return None


def warn_after(timeout_s: float) -> float:
    """Seconds of a wait after which the late rank is named."""
    return min(timeout_s / 10, 10.0)


class Failure(NamedTuple):
    """What a rank says that cannot go on.

    operator: how many operators it had begun in the group. text: what it did, with the class of the error and the call.
    end: of this rank's part in the group, one of RAISED .. LEFT. mismatch: it found itself in another call than a peer.
    """

    operator: int
    text: str
    end: str
    mismatch: bool = False


RAISED = "raised"  # it may go on, if its peers have raised in the same operator
FAILED = "failed"  # no operator of the group runs there any more; it may come to shutdown()
UNCAUGHT = "uncaught"  # its process ends
LEFT = "left"  # by shutdown(): only a rank that waits for more of it is wrong


class Process(NamedTuple):
    """A process of some machine, as another one recognises it."""

    machine: str
    number: int
    started: str

    @classmethod
    def current(cls) -> Process:
        return cls(machine(), os.getpid(), _stat(os.getpid())[1])

    def has_ended(self) -> bool:
        """Whether it is known to have ended: of another machine, or container, nothing is known."""
        if not self.machine or self.machine != machine():
            return False
        state, started = _stat(self.number)
        return state in ("", "Z", "X") or started != self.started


@functools.cache
def machine() -> str:
    """The operating system, and the PID namespace in which this process knows others; empty: not known."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(process: int) -> tuple[str, str]:
    """(state, start time) of a process; ("", "") where it is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except OSError:
        return "", ""


class Peers:
    """The other ranks of a group, as far as they may have failed.

    store: of the group's domain. begun: tells how many operators this rank has begun. called: the group in errors.
    """

    called = "the group"

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.begun: Callable[[], int] = lambda: 0
        self._store = dist.PrefixStore("peers", store)
        self._raised: set[int] = set()  # operators in which this rank has raised
        self._told = False  # that this rank ends
        self.takes_back = False  # what it has told, once it goes on
        self._heard: dict[int, tuple[Failure, float]] = {}  # by rank, and since when
        self._processes: dict[int, Process] = {}
        self._looks = threading.Lock()
        self._store.set(f"process/{rank}", pickle.dumps(Process.current()))

    def go_on(self) -> None:
        """This rank comes to another call: an error before its operator had begun was no failure, if it was caught."""
        self.takes_back = False
        answer_soon(partial(self._store.delete_key, f"failure/{self.rank}"))

    def tell(self, error: BaseException, call: str, end: str, begun: bool = True) -> None:
        """Tell the peers of an error of this rank. call: where it was raised; empty: outside of operators. end: see Failure.
        begun: whether the operator had begun."""
        if self._told and end != UNCAUGHT:
            return
        self._told, self.takes_back = end != RAISED, end == RAISED and not begun
        self._raised.add(self.begun())
        said = str(error).strip()
        kind = type(error).__name__ + (f": {said}" if said else "")
        text = f"raised {kind} (in {call})" if call else f"raised {kind}"
        self._send(Failure(self.begun(), text, end, isinstance(error, OverlapMismatchError)))

    def leave(self) -> None:
        """Tell the peers that this rank has called shutdown()."""
        if not self._told:
            self._told = True
            self._send(Failure(self.begun(), "has called shutdown()", LEFT))

    def _send(self, failure: Failure) -> None:
        def send() -> None:
            self._store.set(f"failure/{self.rank}", pickle.dumps(failure))
            self._store.add("failures", 1)

        answer_soon(send)  # where the store is gone, peers notice that, too

    def error(
        self, what: str, awaited: Sequence[int], closing: bool = False
    ) -> OverlapPeerError | OverlapMismatchError | None:
        """Why this rank need not wait any longer, or None. what: where it waits, in words. awaited: the ranks for which.
        closing: in shutdown(), to which ranks come that have failed, too."""
        return answer_soon(lambda: self._look(what, awaited, closing))  # without news the wait has a limit of its own

    def _look(self, what: str, awaited: Sequence[int], closing: bool) -> OverlapPeerError | OverlapMismatchError | None:
        if not self._looks.acquire(False):  # an earlier look has got no answer yet
            return None
        try:
            heard, now = self._hear(), time.monotonic()
            for rank, (failure, since) in heard.items():
                is_final = now - since > _GRACE_S or self._ended(rank) is not None
                if is_final and self._concerns(failure, rank in awaited, closing):
                    text = f"{what} waits in vain: rank {rank} of {self.called} {failure.text}"
                    return OverlapMismatchError(text) if failure.mismatch else OverlapPeerError(text)
            for rank in awaited:
                process = None if rank in heard else self._ended(rank)
                if process is not None and rank not in self._hear():  # what it told before it ended has come by now
                    text = f"{what} waits in vain: rank {rank} of {self.called} has ended (process {process.number})"
                    return OverlapPeerError(f"{text}; its own log says why")
            return None
        finally:
            self._looks.release()

    def _hear(self) -> dict[int, tuple[Failure, float]]:
        """What the peers have told, by rank, and since when it is known here."""
        before, self._heard = self._heard, {}
        if self._store.add("failures", 0):
            for rank in range(self.world_size):
                key = f"failure/{rank}"
                if rank != self.rank and self._store.check([key]):
                    failure: Failure = pickle.loads(self._store.get(key))
                    same = rank in before and before[rank][0] == failure
                    self._heard[rank] = before[rank] if same else (failure, time.monotonic())
        return self._heard

    def _concerns(self, failure: Failure, is_awaited: bool, closing: bool) -> bool:
        """Whether a failure ends a wait of this rank."""
        if failure.end == UNCAUGHT or closing:
            return failure.end == UNCAUGHT
        if failure.end == RAISED:
            return failure.operator <= self.begun() and failure.operator not in self._raised
        return failure.end == FAILED or is_awaited

    def _ended(self, rank: int) -> Process | None:
        """The process of a rank, if it has ended. One that has not come yet may still begin."""
        key = f"process/{rank}"
        if rank not in self._processes and self._store.check([key]):
            self._processes[rank] = pickle.loads(self._store.get(key))
        process = self._processes.get(rank)
        return process if process is not None and process.has_ended() else None
