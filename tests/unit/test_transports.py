"""What is told to gloo, NCCL and NVSHMEM between nodes, all of them stand-ins, and what happens when they do not come back."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap_train import OverlapTimeoutError
from overlap_train.group.signals import FaultRecord
from overlap_train.nodes import gloo, nccl
from overlap_train.nodes.engines import Exchange
from overlap_train.nodes.nvshmem import NvshmemPuts
from overlap_train.nodes.slots import Place
from overlap_train.ranks.bounded import Callers
from overlap_train.schedule.inter_node import send_recvs
from overlap_train.schedule.kinds import Kind
from overlap_train.schedule.order import Topology

CPU = torch.device("cpu")
TOPOLOGY = Topology(3, 2, 3)  # rank 1 of node 1: its rail peers are 1 and 5
needs_nccl = pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL"), reason="torch without NCCL")


def meeting(theirs: Exception | None = None) -> Any:
    """An agreement. theirs: what a peer reports."""
    rounds = count()
    return SimpleNamespace(
        barrier=lambda what: None,
        store_of=str,
        name_of=lambda what: f"{next(rounds)}/{what}",
        all_succeed=mock.Mock(side_effect=theirs),
        callers=lambda ranks: Callers(TOPOLOGY.rank, tuple(ranks), 60.0),
    )


class Work:
    """Of NCCL. done: whether its kernel has ended. asked: how often somebody wanted to know."""

    done, asked = False, 0

    def is_completed(self) -> bool:
        self.asked += 1
        return self.done

    def wait(self) -> None: ...


class Group:
    """A process group that writes down what it is told."""

    Options = dist.ProcessGroupNCCL.Options if hasattr(dist, "ProcessGroupNCCL") else None

    def __init__(self, store: str, *made: Any) -> None:
        self.store, self.made, self.told, self.works = store, made, list[Any](), list[Work]()
        GROUPS.add(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.told.append("connect")

    def _start_coalescing(self) -> None:
        self.told.append("[")

    def _end_coalescing(self) -> Work:
        self.told.append("]")
        self.works.append(Work())
        return self.works[-1]

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self.told.append(("send", tensors[0].dtype, rank))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self.told.append(("receive", tensors[0].dtype, rank))

    def abort(self) -> None:
        self.told.append("abort")
        ABORTED.append(self.store)

    def shutdown(self) -> None:
        self.told.append("shutdown")


GROUPS: weakref.WeakSet[Group] = weakref.WeakSet()  # those that are still there
ABORTED: list[str] = []


def test_a_gloo_group_that_not_all_have_connected_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although who catches the error holds the frames that it has passed."""
    monkeypatch.setattr(dist, "ProcessGroupGloo", Group)
    GROUPS.clear()
    with pytest.raises(OverlapTimeoutError) as raised:
        gloo.GlooTransport(meeting(OverlapTimeoutError("rank 5")), Topology(1, 2, 1), 60.0, FaultRecord(CPU, 1, 60.0))
    assert raised.tb is not None and not GROUPS


def test_a_send_of_a_process_that_failed_is_raised_ever_after_and_not_awaited() -> None:
    fault = FaultRecord(CPU, 0, 60.0)
    network: Any = object.__new__(gloo.GlooTransport)
    network._topology, network._limit, network._fault, network._under_way = TOPOLOGY, timedelta(seconds=60), fault, []
    network._group = mock.Mock(**{"send.return_value.wait.side_effect": RuntimeError("closed")})
    engine = gloo.HostEngine(60.0, network, fault)
    network.put(torch.ones(2), Place(receiver=5, rank=4, data=0, signal=0), 1)
    for step in (engine.join, fault.check, fault.check):
        with pytest.raises(OverlapTimeoutError, match=r"rank 3 of node 1 could not send to rank 5 of node 2 .*closed"):
            step()
    engine.join()  # what is under way may never arrive
    engine.close()


STREAM = 77


class Bindings:
    """CUDA's driver and NVSHMEM's bindings, in one order."""

    Signal_op = SimpleNamespace(SIGNAL_SET=9)

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def current_stream(self) -> int:
        return STREAM

    def copy(self, *arguments: int) -> int:
        self.calls.append(("copy", *arguments))
        return 0

    def check(self, status: int) -> None:
        assert status == 0

    def putmem_signal_on_stream(self, *arguments: int) -> None:
        self.calls.append(("put", *arguments))

    def signal_op_on_stream(self, *arguments: int) -> None:
        self.calls.append(("signal", *arguments))


def test_nvshmem_is_told_to_put_what_is_staged_with_its_signal() -> None:
    """In one stream. Addresses are the sender's own, in which NVSHMEM finds those of the rank that is named. Words are unsigned:
    an epoch of 2^31 and more is a negative number in int64."""
    told, memory, source, stream = Bindings(), torch.zeros(1000, dtype=torch.uint8), torch.arange(6.0), STREAM
    network: Any = NvshmemPuts(told, told)  # type: ignore[arg-type]
    network.attach(memory, 904)
    start, place = memory.data_ptr(), Place(receiver=1, rank=3, data=64, signal=8)
    network.put(source, place, (5 << 32) + 6)
    network.put(torch.zeros(0), place, -(1 << 63) + 6)
    assert told.calls == [
        ("copy", start + 904, source.data_ptr(), 24, stream),
        ("put", start + 64, start + 904, 24, start + 8, (5 << 32) + 6, 9, 3, stream),
        ("signal", start + 8, (1 << 63) + 6, 9, 3, stream),
    ]
    with pytest.raises(AssertionError):
        network.put(torch.zeros(25), place, 6)


class Event:
    """Of CUDA. reached: whether its stream has come so far."""

    reached = True

    def record(self) -> None:
        EVENTS.append(self)

    def query(self) -> bool:
        return self.reached


EVENTS: list[Event] = []  # in the order in which they were recorded
LIMITED: list[tuple[str, Callers]] = []  # calls within a time limit


@contextlib.contextmanager
def bounded(what: str, callers: Callers) -> Iterator[None]:
    LIMITED.append((what, callers))
    yield


Open = Callable[[float], tuple[Any, FaultRecord]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Makes a transport by NCCL with a time-out, and its record of failures."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group)
    monkeypatch.setattr(nccl, "_LOOK_S", 0.01)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(nccl, "leave_captures_alone", lambda: None)
    monkeypatch.setattr(nccl, "bounded", bounded)
    EVENTS.clear(), LIMITED.clear()
    agreement, open_ones = meeting(), list[nccl.NcclTransport]()

    def make(timeout_s: float) -> tuple[nccl.NcclTransport, FaultRecord]:
        fault = FaultRecord(CPU, TOPOLOGY.rank, timeout_s)
        open_ones.append(nccl.NcclTransport(agreement, TOPOLOGY, CPU, timeout_s, fault, 6))
        return open_ones[-1], fault

    yield make
    for one in open_ones:
        one.close(orderly=False)


def exchange(transport: Any, elements: int = 4) -> None:
    word = torch.zeros(1, dtype=torch.int64)
    call: Any = SimpleNamespace(slot=SimpleNamespace(epoch=word), crossed=lambda received: word)
    data, exchanged = torch.zeros(elements), send_recvs(Kind.AG_GEMM, TOPOLOGY, 1)[0]
    transport.start(Exchange(call, exchanged, data, buffer=torch.zeros(elements)))


@needs_nccl
def test_nccl_is_told_of_a_send_and_a_receive_as_one_group_each_with_its_word(opened: Open) -> None:
    """First to the next node and from the one before; a barrier has words only."""
    transport, _ = opened(60.0)
    exchange(transport)
    exchange(transport, 0)
    data = [("send", torch.float32, 2), ("receive", torch.float32, 0)]
    words = [("send", torch.int64, 2), ("receive", torch.int64, 0)]
    assert transport._group.told == ["connect", "[", *data, *words, "]", "[", *words, "]"]
    rank, size, options = transport._group.made
    assert (rank, size, options.config.max_ctas, options.is_high_priority_stream) == (1, 3, 6, True)
    assert options.config.cga_cluster_size == 1, "any free SM is as good as another"
    assert options._timeout.total_seconds() > 60.0 + 600, "its own watchdog comes last"
    assert opened(60.0)[0]._group.store != transport._group.store, "each meets in a place of its own"
    transport.close(orderly=True)
    transport.close(orderly=False)
    assert transport._group.told[-1] == "shutdown"
    callers = Callers(TOPOLOGY.rank, (1, 3, 5), 60.0)
    limited = [f"overlap_train: {step} the nodes of the group" for step in ("connect", "disconnect")]
    assert (LIMITED[0], LIMITED[-1]) == ((limited[0], callers), (limited[1], callers))


@needs_nccl
def test_a_communicator_that_not_all_have_connected_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group)
    threads, agreement = set(threading.enumerate()), meeting(OverlapTimeoutError("rank 5"))
    ABORTED.clear()
    with pytest.raises(OverlapTimeoutError, match="rank 5"):
        nccl.NcclTransport(agreement, TOPOLOGY, CPU, 60.0, FaultRecord(CPU, TOPOLOGY.rank, 60.0), 6)
    assert len(ABORTED) == 1
    assert threads.issuperset(threading.enumerate())


def wait_until(ready: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < limit
        time.sleep(0.005)


def looked(work: Work) -> None:
    """Return when a transport has looked at this exchange, and done what it then does."""
    before = work.asked
    wait_until(lambda: work.asked > before + 1)


@needs_nccl
def test_an_exchange_is_late_by_its_own_time_named_and_ended(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time behind other work of the stream does not count, nor behind another exchange."""
    now = [0.0]
    monkeypatch.setattr(nccl, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Event, "reached", False)
    transport, fault = opened(60.0)
    exchange(transport)
    exchange(transport)
    first, second = transport._group.works
    looked(first)
    now[0] = 1000.0
    looked(first)
    fault.check()
    EVENTS[0].reached = EVENTS[1].reached = True
    looked(first)
    now[0], first.done = 1050.0, True
    looked(second)
    now[0] = 1100.0
    looked(second)
    fault.check()
    now[0] = 1111.0
    wait_until(lambda: "abort" in transport._group.told)
    named = r"rank 3 of node 1 waited 60 s to send to rank 5 of node 2 and to receive from rank 1 of node 0"
    for step in (fault.check, lambda: exchange(transport)):
        with pytest.raises(OverlapTimeoutError, match=named):
            step()


@needs_nccl
def test_a_wait_that_gave_up_on_the_device_ends_what_is_under_way(opened: Open) -> None:
    """Or the streams would hang, and with them the host, before it could raise the error of that wait."""
    from overlap_train.kernels.signal_words import FAULT_SET

    transport, fault = opened(60.0)
    exchange(transport)
    fault.record[FAULT_SET] = 1
    wait_until(lambda: "abort" in transport._group.told)
