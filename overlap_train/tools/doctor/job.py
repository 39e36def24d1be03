"""Runs one check after the other on all ranks, none for longer than its limit, and names who is to blame when one does not end.

A check runs on a worker thread and may hang in CUDA, NCCL or NVSHMEM. The main thread watches the clock and the job's key-value
store, which needs no peer: ranks post their findings there, and go on when all have posted.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..measure.world import first_line

OK, WARN, FAIL = "OK", "WARN", "FAIL"
_TURN_S = 0.05
_GRACE_S = 5.0  # what ranks get after another one has raised, and for a roll call
# Beyond the limit: a call that nothing can interrupt ends its process (ranks/bounded.py). Before that come the grace, a
# roll call and the report.
CALL_S = 30.0
_LEFT_S = 10.0
_DEAD = "the process is dead or stopped: see its own log, then dmesg and nvidia-smi there"


@dataclass(frozen=True)
class Finding:
    """What one check found on one rank.

    status: OK, WARN (it works, but not as it could, or could not be checked) or FAIL (training would fail or be wrong).
    measured, expected, fix: text with units; the last two may be empty. rank, host: put in by the job.
    """

    status: str
    name: str
    measured: str
    expected: str = ""
    fix: str = ""
    rank: int | None = None
    host: str = ""


def verdict(findings: Sequence[Finding]) -> str:
    """The worst status; OK where nothing was found."""
    return max((finding.status for finding in findings), key=(OK, WARN, FAIL).index, default=OK)


Work = Callable[[], list[Finding]]


class Job:
    """This rank in the job. findings: of all ranks so far. broken: a check has not ended, so no other can run."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank, self.size, self.findings, self.broken = rank, size, list[Finding](), False
        self.hosts = ["unknown host"] * size
        self.hosts[rank] = socket.gethostname()
        self._answering: Collection[int] = range(size)
        self._store, self._terminated = store, False
        self._worker = ThreadPoolExecutor(1)  # one thread for all checks: the current GPU is a thread's
        signal.signal(signal.SIGTERM, self._terminate)

    def run(self, name: str, work: Work, limit_s: float, fix: str) -> list[Finding]:
        """The findings of a check on all ranks, which are also added to `findings`; nothing once a check has not ended.

        name: unique. fix: what to do if the check raises or does not end.
        """
        if self.broken:
            return []
        self._worker.submit(self._post_outcome, name, work, fix)
        try:
            found = self._outcome(name, limit_s, fix)
        except dist.DistError:  # of the store; the other ranks can no longer be asked
            lost = "the job's store is gone: rank 0, or the torchrun that serves it, has ended"
            found = [Finding(FAIL, name, lost, "", _DEAD, 0, self.hosts[0])]
            elsewhere = [rank for rank, host in enumerate(self.hosts) if host != self.hosts[0]]
            self._answering = elsewhere or range(1, self.size)
            self._give_up(name)
        self.findings += found
        return found

    def _outcome(self, name: str, limit_s: float, fix: str) -> list[Finding]:
        """What all ranks have found by a check, or who is to blame that it has not ended."""
        began = time.monotonic()
        replies = self._wait(name, limit_s)
        self.hosts = [replies[rank]["host"] if rank in replies else host for rank, host in enumerate(self.hosts)]
        found = [Finding(**finding) for reply in replies.values() for finding in reply["findings"]]
        if len(replies) < self.size:
            ended = "when the job was ended (SIGTERM) after" if self._terminated else "after"
            self._terminated = False
            after = f"{ended} {time.monotonic() - began:.0f} s"
            found += self._blame(Finding(FAIL, name, after, f"an answer within {limit_s:g} s", fix), replies)
            self._give_up(name)
        return found

    def _give_up(self, name: str) -> None:
        self.skip(f"whatever follows {name}, which did not end")
        self.broken = True

    def skip(self, what: str) -> None:
        """Add a finding: what could not be checked. Once a check has not ended, that has been said."""
        if not self.broken:
            fix = "repair what says FAIL first, then run again"
            self.findings.append(Finding(WARN, "not checked", what, "", fix))

    @property
    def speaks(self) -> bool:
        """The first rank that answers does: it prints."""
        return self.rank == min(self._answering)

    def leave(self) -> None:
        """Under srun rank 0 serves the store: it waits until nobody asks it any more."""
        with suppress(dist.DistError):  # the store is gone
            self._post("left")
            if self.rank == 0:
                self._wait("left", _LEFT_S, self._answering)

    def _post(self, name: str, findings: Collection[Finding] = (), raised: bool = False) -> None:
        host = self.hosts[self.rank]
        own = [asdict(replace(finding, rank=self.rank, host=host)) for finding in findings]
        self._store.set(f"{name}/{self.rank}", json.dumps({"host": host, "raised": raised, "findings": own}))

    def _post_outcome(self, name: str, work: Work, fix: str) -> None:
        try:
            self._post(name, work())
        except BaseException as error:
            self._post(name, [Finding(FAIL, name, first_line(error), "no error", fix)], raised=True)

    def _wait(self, name: str, limit_s: float, ranks: Collection[int] | None = None) -> dict[int, Any]:
        """What was posted when all ranks, or those that are named, had posted; at the latest after `limit_s` seconds, soon after
        one has raised, and at once when the job is ended."""
        deadline, needed = time.monotonic() + limit_s, set(range(self.size) if ranks is None else ranks)
        while True:
            there = [rank for rank in range(self.size) if self._store.check([f"{name}/{rank}"])]
            replies, now = {rank: json.loads(self._store.get(f"{name}/{rank}")) for rank in there}, time.monotonic()
            if any(reply["raised"] for reply in replies.values()):
                deadline = min(deadline, now + _GRACE_S)
            if needed <= replies.keys() or now > deadline or self._terminated:
                return replies
            time.sleep(_TURN_S)

    def _blame(self, culprit: Finding, replies: dict[int, Any]) -> list[Finding]:
        """Who is silent in a roll call; else who raised, which has said so itself; else who has not ended the check."""
        self._post(f"{culprit.name}/roll call")
        self._answering = self._wait(f"{culprit.name}/roll call", _GRACE_S).keys()
        silent = [rank for rank in range(self.size) if rank not in self._answering]
        if silent:
            said = replace(culprit, measured=f"does not answer {culprit.measured}", fix=_DEAD)
        elif any(reply["raised"] for reply in replies.values()):
            return []
        else:
            said = replace(culprit, measured=f"alive, but still in this check {culprit.measured}")
            silent = [rank for rank in range(self.size) if rank not in replies]
        return [replace(said, rank=rank, host=self.hosts[rank]) for rank in silent]

    def _terminate(self, number: int, frame: object) -> None:
        """torchrun ends the other ranks when one has died; the report still comes."""
        self._terminated = True


def open_job(limit_s: float) -> Job:
    """The job of torchrun's variables; this process alone where RANK is not set.

    Connects as torch.distributed does (torchrun's agent or rank 0 serves) but waits for nobody: a rank that never came is named
    later.

    Raises:
        RuntimeError: the store did not answer within `limit_s` seconds.
        KeyError: a variable of the launcher is missing.
    """
    if "RANK" not in os.environ:
        return Job(dist.HashStore(), 0, 1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0 and not is_served,
        timedelta(seconds=limit_s), wait_for_workers=False, multi_tenant=True,
    )  # fmt: skip
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restarted job finds the keys of the earlier one
    return Job(dist.PrefixStore(f"overlap_train.doctor/{attempt}", store), rank, size)
