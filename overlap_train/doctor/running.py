"""Runs one check after the other on all ranks, none for longer than its limit, and names who is to blame when one does not end.

A check runs on a worker thread and may hang in CUDA, NCCL or NVSHMEM; the main thread watches the clock and the board. Ranks
start a check together: each posts its findings and goes on when all have posted. When the time is up, or torchrun ends the job,
a roll call tells dead or stopped ranks from those that are merely waiting for them.
"""

from __future__ import annotations

import faulthandler
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from .board import Board
from .place import first_line
from .report import FAIL, CheckFailed, Finding

_TURN_S, _SLOW_TURN_S = (
    0.02,
    0.2,
)  # the store is asked less often after two seconds: it takes time from what is measured
_BACKSTOP_S = 60.0  # beyond the limit: ends a process whose main thread cannot run either


@dataclass(frozen=True)
class Check:
    """name: unique; run: the same check on every rank; limit_s: seconds it may take; fix: what to do if it does not end."""

    name: str
    run: Callable[[], list[Finding]]
    limit_s: float
    fix: str


class Terminated(Exception):
    """SIGTERM: torchrun ends the other ranks when one has died."""


class Runner:
    """The findings of all ranks so far (`findings`), and whether checks can go on (`broken`)."""

    def __init__(self, board: Board, host: str, grace_s: float = 5.0) -> None:
        self.findings: list[Finding] = []
        self.hosts: list[str] = ["unknown host"] * board.size
        self.hosts[board.rank] = host
        self.broken = False
        self.answering = list(range(board.size))  # ranks that were alive last time
        self._board, self._grace_s = board, grace_s
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._worker, name="overlap_train doctor", daemon=True).start()

    def run(self, check: Check) -> list[Finding]:
        """The check's findings on all ranks, which are also added to `findings`. Does nothing once a check has not ended."""
        if self.broken:
            return []
        faulthandler.dump_traceback_later(check.limit_s + self._grace_s + _BACKSTOP_S, exit=True)
        future: Future[list[Finding]] = Future()
        self._work.put((future, check.run))
        began, ended = time.monotonic(), "after"
        try:
            done = self._settle(check, future)
        except Terminated:
            done, ended = False, "when the job was ended (SIGTERM) after"
        found = self._collect(check.name)
        if not done:
            self.broken = True
            found += self._blame(check, f"{ended} {time.monotonic() - began:.0f} s")
        faulthandler.cancel_dump_traceback_later()
        self.findings += found
        return found

    def _worker(self) -> None:
        while True:
            future, work = self._work.get()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    def _settle(self, check: Check, future: Future[list[Finding]]) -> bool:
        """Wait until all ranks have posted. A rank that raised has left its peers waiting: they get the grace, not the limit."""
        began, posted, raised = time.monotonic(), False, False
        deadline = began + check.limit_s
        while time.monotonic() < deadline:
            if future.done() and not posted:
                self._board.post(check.name, self._outcome(check, future))
                posted = True
            if posted and not self._board.missing(check.name):
                return True
            if not raised and any(reply["raised"] for reply in self._board.read(check.name).values()):
                deadline, raised = min(deadline, time.monotonic() + self._grace_s), True
            time.sleep(_TURN_S if time.monotonic() < began + 2 else _SLOW_TURN_S)
        return False

    def _outcome(self, check: Check, future: Future[list[Finding]]) -> dict[str, Any]:
        rank, host = self._board.rank, self.hosts[self._board.rank]
        try:
            findings, raised = future.result(), False
        except CheckFailed as error:
            findings, raised = error.findings, True
        except BaseException as error:
            findings, raised = [Finding(check.name, FAIL, first_line(error), "no error", check.fix, rank, host)], True
        return {"host": host, "raised": raised, "findings": [asdict(finding) for finding in findings]}

    def _collect(self, name: str) -> list[Finding]:
        replies = self._board.read(name)
        for rank, reply in replies.items():
            self.hosts[rank] = reply["host"]
        return [Finding(**finding) for reply in replies.values() for finding in reply["findings"]]

    def _blame(self, check: Check, when: str) -> list[Finding]:
        """Who is silent; else who raised (they have said so themselves); else who has not ended the check."""
        self._board.post(f"{check.name}/roll call", self.hosts[self._board.rank])
        silent = self._board.wait(f"{check.name}/roll call", self._grace_s)
        self.answering = [rank for rank in self.answering if rank not in silent]
        replies, culprit = (
            self._board.read(check.name),
            Finding(check.name, FAIL, "", f"an answer within {check.limit_s:g} s"),
        )
        if silent:
            fix = "the process is dead or stopped: see that rank's own log, then dmesg and nvidia-smi on its host"
            text = f"does not answer {when}"
            return [replace(culprit, measured=text, fix=fix, rank=rank, host=self.hosts[rank]) for rank in silent]
        if any(reply["raised"] for reply in replies.values()):
            return []
        late = [rank for rank in range(self._board.size) if rank not in replies]
        text = f"alive, but still in this check {when}"
        return [replace(culprit, measured=text, fix=check.fix, rank=rank, host=self.hosts[rank]) for rank in late]


@contextmanager
def terminated_as_error() -> Iterator[None]:
    """SIGTERM raises Terminated in the main thread, so that the report still comes."""

    def raise_terminated(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: the report is on its way
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # Python's signals belong to that one
        yield
        return
    before = signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
