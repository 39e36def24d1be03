"""Runs one check after the other on all ranks, none for longer than its limit, and names who is to blame when one does not end.

A check runs on a worker thread and may hang in CUDA, NCCL or NVSHMEM. The main thread watches the clock and the job's key-value
store, which needs no peer: ranks post their findings there, and go on when all have posted.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..measure.world import first_line
from .report import FAIL, Finding

_LAUNCHER = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# The store is asked less often after two seconds: each question takes time from what is measured.
_TURN_S, _SLOW_TURN_S = 0.02, 0.2
# Beyond the limit: a call that nothing can interrupt ends its process (symmetric/bounded.py). Before that come the grace, or a
# roll call, and the report, for which ranks wait twice.
CALL_S = 30.0
_KNOWN_S = 10.0
_BACKSTOP_S = 60.0  # beyond the limit: ends a process whose main thread cannot run either
Work = Callable[[], list[Finding]]


class Job:
    """This rank in the job. findings: of all ranks so far. broken: a check has not ended, so no other can run.

    answering: the ranks that were alive last time. grace_s: what ranks get after another one has raised.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, host: str = "", grace_s: float = 5.0) -> None:
        self.rank, self.size, self.findings, self.broken = rank, size, list[Finding](), False
        self.hosts = ["unknown host"] * size
        self.hosts[rank] = host or socket.gethostname()
        self.answering = list(range(size))
        self._store, self._grace_s, self._terminated = store, grace_s, False
        self._worker = ThreadPoolExecutor(1)
        with suppress(ValueError):  # not in the main thread, which Python's signals belong to
            signal.signal(signal.SIGTERM, self._terminate)

    def run(self, name: str, work: Work, limit_s: float, fix: str) -> list[Finding]:
        """The findings of a check on all ranks, which are also added to `findings`; nothing once a check has not ended.

        name: unique. fix: what to do if the check does not end.
        """
        if self.broken:
            return []
        faulthandler.dump_traceback_later(limit_s + self._grace_s + _BACKSTOP_S, exit=True)
        began = time.monotonic()
        replies = self._settled(name, self._worker.submit(work), limit_s, fix)
        self.hosts = [replies[rank]["host"] if rank in replies else host for rank, host in enumerate(self.hosts)]
        found = [Finding(**finding) for reply in replies.values() for finding in reply["findings"]]
        if len(replies) < self.size:
            self.broken = True
            ended = "when the job was ended (SIGTERM) after" if self._terminated else "after"
            culprit = Finding(
                name, FAIL, f"{ended} {time.monotonic() - began:.0f} s", f"an answer within {limit_s:g} s"
            )
            found += self._blame(culprit, replies, fix)
        faulthandler.cancel_dump_traceback_later()
        self.findings += found
        return found

    def post(self, name: str, value: Any) -> None:
        """Tell the other ranks; JSON."""
        self._store.set(f"{name}/{self.rank}", json.dumps(value))

    def posted(self, name: str) -> dict[int, Any]:
        """What ranks have posted under a name, by rank. Never waits."""
        keys = {rank: f"{name}/{rank}" for rank in range(self.size)}
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def wait(self, name: str, limit_s: float, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """What is posted when all ranks, or those that are named, have posted, at the latest after `limit_s` seconds."""
        deadline, needed = time.monotonic() + limit_s, set(range(self.size) if ranks is None else ranks)
        while not needed <= (found := self.posted(name)).keys() and time.monotonic() < deadline:
            time.sleep(_TURN_S)
        return found

    def wait_for_report(self, speaker: int) -> None:
        """Wait until the rank that prints has done so; on that rank, until all that answer know. Twice ten seconds at most.

        Under srun rank 0 serves the store, which is gone when that rank has left. Others may still be asking it for the findings
        of the last check.
        """
        with suppress(dist.DistError):
            self.wait("reported", _KNOWN_S, [speaker])
            self.post("known", True)
            if self.rank == speaker:
                self.wait("known", _KNOWN_S, self.answering)

    def _settled(self, name: str, future: Future[list[Finding]], limit_s: float, fix: str) -> dict[int, Any]:
        """Post this rank's outcome and wait for the others'. If a rank has raised, the rest get the grace, not the limit."""
        began, posted = time.monotonic(), False
        deadline = began + limit_s
        while True:
            if future.done() and not posted:
                self.post(name, self._outcome(name, future, fix))
                posted = True
            replies, now = self.posted(name), time.monotonic()
            if any(reply["raised"] for reply in replies.values()):
                deadline = min(deadline, now + self._grace_s)
            if len(replies) == self.size or now > deadline or self._terminated:
                return replies
            time.sleep(_TURN_S if now < began + 2 else _SLOW_TURN_S)

    def _outcome(self, name: str, future: Future[list[Finding]], fix: str) -> dict[str, Any]:
        try:
            findings, raised = future.result(), False
        except BaseException as error:
            findings, raised = [Finding(name, FAIL, first_line(error), "no error", fix)], True
        host = self.hosts[self.rank]
        own = [asdict(replace(finding, rank=self.rank, host=host)) for finding in findings]
        return {"host": host, "raised": raised, "findings": own}

    def _blame(self, culprit: Finding, replies: dict[int, Any], fix: str) -> list[Finding]:
        """Who is silent in a roll call; else who raised, which has said so itself; else who has not ended the check."""
        self.post(f"{culprit.name}/roll call", True)
        alive = self.wait(f"{culprit.name}/roll call", self._grace_s)
        silent = [rank for rank in range(self.size) if rank not in alive]
        self.answering = [rank for rank in self.answering if rank in alive]
        if not silent and any(reply["raised"] for reply in replies.values()):
            return []
        text = "does not answer" if silent else "alive, but still in this check"
        if silent:
            fix = "the process is dead or stopped: see that rank's own log, then dmesg and nvidia-smi on its host"
        blamed = silent or [rank for rank in range(self.size) if rank not in replies]
        said = replace(culprit, measured=f"{text} {culprit.measured}", fix=fix)
        return [replace(said, rank=rank, host=self.hosts[rank]) for rank in blamed]

    def _terminate(self, number: int, frame: object) -> None:
        """torchrun ends the other ranks when one has died; the report still comes."""
        self._terminated = True


def open_job(limit_s: float) -> Job:
    """The job of torchrun's variables; this process alone where RANK is not set.

    Connects as torch.distributed does (torchrun's agent or rank 0 serves) but waits for nobody: a rank that never came is named
    later.

    Raises:
        RuntimeError: the store did not answer within `limit_s` seconds.
        ValueError: the launcher's environment is incomplete.
    """
    if "RANK" not in os.environ:
        return Job(dist.HashStore(), 0, 1)
    missing = [name for name in _LAUNCHER if name not in os.environ]
    if missing:
        raise ValueError(f"RANK is set, but {', '.join(missing)} not: start the ranks with torchrun")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        rank == 0 and not is_served,
        timedelta(seconds=limit_s),
        wait_for_workers=False,
        multi_tenant=True,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restarted job finds the keys of the earlier one
    return Job(dist.PrefixStore(f"overlap_train.doctor/{attempt}", store), rank, size)
