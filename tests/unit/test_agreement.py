"""Ranks that tell each other something through a key-value store; here the ranks are threads and the store is a local one."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from overlap_train import OverlapTimeoutError
from overlap_train.ranks import agreement
from overlap_train.ranks.agreement import Agreement
from overlap_train.ranks.bounded import Callers
from overlap_train.ranks.peers import UNCAUGHT, Peers, Process


def ranks(world: int, timeout_s: float = 30.0) -> list[Agreement]:
    store, found = dist.HashStore(), []
    for rank in range(world):
        one = object.__new__(Agreement)
        one.timeout_s, one.rank, one.world_size = timeout_s, rank, world
        one._store, one._number, one._asks = store, 0, threading.Lock()  # type: ignore[assignment]
        one.peers = Peers(store, rank, world)
        found.append(one)
    return found


def together(agreements: list[Agreement], act: Callable[[Agreement], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(agreements)) as threads:
        return list(threads.map(act, agreements))


def test_each_gets_the_values_of_all_by_rank_in_every_round() -> None:
    three = ranks(3)
    for turn in range(3):
        values = together(three, lambda one: one.exchange((one.rank, turn), "fc1"))  # noqa: B023
        assert values == [[(rank, turn) for rank in range(3)]] * 3


def test_rounds_that_all_have_read_are_deleted() -> None:
    two = ranks(2)
    for _ in range(3):
        together(two, lambda one: one.barrier("fc1"))
    assert (
        sorted(two[0]._store.check([key]) for key in ("0/0", "0/1", "1/0", "1/1", "2/0", "2/1"))
        == [False] * 4 + [True] * 2
    )


def test_those_who_do_not_come_are_named_and_those_who_came_are_not() -> None:
    one, _, two = ranks(4, timeout_s=0.05)[:3]
    two._store.set("0/2", b"")
    with (
        pytest.warns(UserWarning, match=r"rank 0 has waited .* for ranks 1, 3 of the group"),
        pytest.raises(OverlapTimeoutError, match=r"fc1: rank 0 waited 0.05 s for ranks 1, 3 of the group"),
    ):
        one.exchange(None, "fc1")


class LastMoment:
    """A store into which rank 1 puts its key right after rank 0 has looked for all keys the first time."""

    def __init__(self, store: dist.Store, theirs: bytes) -> None:
        self._store, self._theirs = store, theirs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        found = self._store.check(keys)
        self._store.set("0/1", self._theirs)
        return found


def test_one_that_comes_at_the_last_moment_is_not_late() -> None:
    """It has seen all keys, and goes on: who gave up now would be alone with that."""
    one = ranks(2, timeout_s=0.0)[0]
    one._store = LastMoment(one._store, pickle.dumps(("fc1", "fc1", "theirs")))  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as told:
        assert one.exchange("mine", "fc1") == ["mine", "theirs"]
    assert told == [], "it would name nobody"
    assert one._store.check(["0/0"]), "the other one may still have to read it"


def test_an_error_of_one_is_raised_by_all() -> None:
    def act(one: Agreement) -> str:
        with pytest.raises(RuntimeError) as raised:
            one.all_succeed("none left" if one.rank == 1 else None, "open")
        return str(raised.value)

    assert together(ranks(2), act) == ["open: rank 1: none left"] * 2
    assert together(ranks(2), lambda one: one.all_succeed(None, "open")) == [None] * 2


def test_a_rank_that_ends_while_its_peer_looks_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises and ends after the peer has read what ranks have told, and before the peer looks for its process."""
    one, other = (each.peers for each in ranks(2))

    def ends(process: Process) -> bool:
        other.tell(MemoryError("none left"), "fc1", UNCAUGHT)
        monkeypatch.setattr(Process, "has_ended", lambda process: True)
        return True

    monkeypatch.setattr(Process, "has_ended", ends)
    said = one.error("rank 0", [1]) or one.error("rank 0", [1])
    assert "rank 1 of the group raised MemoryError: none left (in fc1)" in str(said)


SERVES = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("error", ["no interface", None])
def test_one_that_failed_says_so_where_its_peers_do_not_come(error: str | None) -> None:
    """They may wait inside a library for what failed here."""
    one, _ = ranks(2, timeout_s=0.05)
    with warnings.catch_warnings(action="ignore"), pytest.raises(OverlapTimeoutError, match="for rank 1") as raised:
        one.all_succeed(error, "connect")
    assert getattr(raised.value, "__notes__", []) == (
        [] if error is None else ["rank 0 itself had failed: no interface"]
    )


def test_a_store_whose_process_is_stopped_is_said_so() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVES], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        store = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False, wait_for_workers=False)
        (one,) = ranks(1, timeout_s=0.5)
        one._store, one._group_store = store, store  # type: ignore[assignment]
        one.barrier("before")
        os.kill(host.pid, signal.SIGSTOP)
        os.waitpid(host.pid, os.WUNTRACED)  # or its thread may answer once more before it stops
        late = threading.Timer(20.0, host.kill)  # or a rank that waits for ever would hold this test
        late.start()
        told = "rank 0 waited 0.5 s, and the key-value store of the job does not answer"
        with pytest.raises(OverlapTimeoutError, match=f"fc1: {told}"):
            one.exchange(None, "fc1")
        with pytest.raises(OverlapTimeoutError, match=f"count the domains of the group: {told}"):
            one._count_generation(1)
        os.kill(host.pid, signal.SIGCONT)
        one.timeout_s = 15.0
        assert one._count_generation(1) == 1, "the one before has come to nothing, so it does not count"
        assert one.exchange("again", "fc1") == ["again"]
        late.cancel()
        host.kill()


ENDS = """
import atexit
from overlap_train.ranks.agreement import answer
atexit.register(lambda: print(answer(lambda: "told", 30.0)))
"""


def test_the_store_answers_while_python_ends() -> None:
    """As a program asks that has registered shutdown() with atexit. From Python 3.12 on no thread can be started then."""
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("told\n", "")


def test_those_who_call_a_library_together_have_their_numbers_in_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 5, 6, 7])
    one = ranks(4, timeout_s=130.0)[2]
    one.group, one.call_s = None, None  # type: ignore[assignment]
    assert one.callers() == Callers(6, (4, 5, 6, 7), 130.0)
    assert one.callers(range(2, 4)) == Callers(6, (6, 7), 130.0)
    one.timeout_s = 4.0
    assert one.callers().limit_s == 120.0, "NVSHMEM may take longer to start than a rank is to wait in training"
    one.call_s = 90.0
    assert one.callers().limit_s == 90.0, "the doctor's own limit comes first"


def test_a_store_that_is_gone_is_said_so() -> None:
    class Gone:
        def set(self, *_: object) -> None:
            raise dist.DistNetworkError("broken pipe")

        add = set

    one = ranks(1)[0]
    one._store = one._group_store = Gone()  # type: ignore[assignment]
    with pytest.raises(OverlapTimeoutError, match="rank 0 lost the key-value store of the job"):
        one.exchange(None, "fc1")
    with pytest.raises(OverlapTimeoutError, match="domains of the group: rank 0 lost the key-value store of the job"):
        one._count_generation(1)


def test_nobody_is_left_behind_in_a_round_that_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C, or by an exception of a signal handler. Its thread went on, and at its time limit took the key back, although
    this rank had come again: then all ranks waited for this one, itself too."""
    two = ranks(2)

    def interrupted(ask: Callable[[], Any], limit_s: float) -> Any:
        threads.append(threading.Thread(target=ask, daemon=True))
        threads[0].start()
        raise KeyboardInterrupt

    threads: list[threading.Thread] = []
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # nobody waits for what it raises
    with monkeypatch.context() as patched:
        patched.setattr(agreement, "answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            two[0].exchange("first", "fc1")
    threads[0].join(20.0)
    assert not threads[0].is_alive(), "it waits for the others, beside what this rank does next"
    assert together(two, lambda one: one.exchange(("again", one.rank), "fc1")) == [[("again", 0), ("again", 1)]] * 2


def test_what_a_rank_asks_waits_for_a_thread_that_is_left_behind() -> None:
    """It would take back what this rank tells anew."""
    (one,) = ranks(1, timeout_s=0.05)
    with one._asks, pytest.raises(OverlapTimeoutError, match="the key-value store of the job does not answer"):
        one.exchange("first", "fc1")
    assert one.exchange("again", "fc1") == ["again"]


def test_a_domain_that_was_counted_too_late_does_not_count() -> None:
    """The store went on when this rank had given up. Its peers count as many domains as have been made."""
    (one,) = ranks(1)
    one._group_store, given_up = one._store, threading.Event()
    assert one._counted(1, given_up) == 1
    given_up.set()
    one._counted(1, given_up)
    assert one._group_store.add("overlap_train/generation/0", 0) == 1
