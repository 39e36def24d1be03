"""What is told to NCCL between nodes, and what happens when it does not come back. NCCL itself is a stand-in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap_train.group.signals import FaultRecord
from overlap_train.nodes import nccl
from overlap_train.nodes.transport import Piece
from overlap_train.schedule.inter_node import crossings
from overlap_train.schedule.order import A2A_GEMM, GATHER, Topology
from overlap_train.symmetric.agreement import OverlapTimeoutError
from overlap_train.symmetric.bounded import Callers

CPU = torch.device("cpu")
TOPOLOGY = Topology(3, 2, 3)  # rank 1 of node 1: its twins are 1 and 5
pytestmark = pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL"), reason="torch without NCCL")


class Event:
    """Of CUDA. reached: whether its stream has come so far."""

    reached = True

    def record(self) -> None:
        EVENTS.append(self)

    def query(self) -> bool:
        return self.reached


LEFT_ALONE: list[threading.Thread] = []  # who has promised it
EVENTS: list[Event] = []  # in the order in which they were recorded


class Work:
    """Of NCCL. done: whether its kernel has ended. asked: how often somebody wanted to know."""

    done, asked = False, 0

    def is_completed(self) -> bool:
        assert threading.current_thread() in LEFT_ALONE, "or the capture of a graph would end"
        self.asked += 1
        return self.done

    def wait(self) -> None:
        pass


class Group:
    """A process group that writes down what it is told."""

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.store, self.made, self.told, self.works = store, (rank, size, options), [], []

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

    def shutdown(self) -> None:
        self.told.append("shutdown")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], Any]]:
    """Makes a transport with a time-out and its record of failures."""
    open_ones: list[nccl.NcclTransport] = []

    def group(*arguments: Any) -> Group:
        return Group(*arguments)

    group.Options = dist.ProcessGroupNCCL.Options  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", group)
    monkeypatch.setattr(nccl, "_LOOK_S", 0.01)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(nccl, "leave_captures_alone", lambda: LEFT_ALONE.append(threading.current_thread()))
    EVENTS.clear()
    rounds = count()
    agreement: Any = SimpleNamespace(
        barrier=lambda what: None,
        store_of=lambda name: name,
        name_of=lambda what: f"round {next(rounds)}/{what}",
        all_succeed=lambda error, what: None,
        callers=lambda ranks: Callers(TOPOLOGY.rank, tuple(ranks), 60.0),
    )

    def make(timeout_s: float, sms: int = 6) -> tuple[nccl.NcclTransport, FaultRecord]:
        fault = FaultRecord(CPU, TOPOLOGY.rank, timeout_s)
        open_ones.append(nccl.NcclTransport(agreement, TOPOLOGY, CPU, timeout_s, fault, sms))
        return open_ones[-1], fault

    yield make
    for one in open_ones:
        one.close(orderly=False)


def piece(elements: int = 4) -> Piece:
    return Piece(torch.zeros(elements), torch.zeros(1, dtype=torch.int64))


def exchange(transport: nccl.NcclTransport, elements: int = 4, kind: str = GATHER) -> Any:
    return transport.exchange(crossings(kind, TOPOLOGY, 1)[0], piece(elements), piece(elements))


@pytest.mark.parametrize("kind", [GATHER, A2A_GEMM])
def test_a_send_and_a_receive_are_one_group_each_with_its_word(opened: Callable[[float], Any], kind: str) -> None:
    """First to the next node and from the one before; a barrier has words only. A block for any rank there goes to the twin."""
    transport, _ = opened(60.0)
    exchange(transport, kind=kind)
    exchange(transport, 0, kind)
    data, words = (
        [("send", torch.float32, 2), ("receive", torch.float32, 0)],
        [("send", torch.int64, 2), ("receive", torch.int64, 0)],
    )
    assert transport._group.told == ["connect", "[", *data, *words, "]", "[", *words, "]"]


def test_it_may_take_few_sms_and_its_own_watchdog_comes_last(opened: Callable[[float], Any]) -> None:
    rank, size, options = opened(60.0)[0]._group.made
    assert (rank, size, options.config.max_ctas, options.is_high_priority_stream) == (1, 3, 6, True)
    assert options.config.cga_cluster_size == 1, "any free SM is as good as another"
    assert options._timeout.total_seconds() > 60.0 + 600, "it counts from when the host enqueues"


def test_a_communicator_meets_in_a_place_of_its_own(opened: Callable[..., Any]) -> None:
    """Twins alone, and only this time: one with as many SMs may have failed, and its NCCL's id still be there."""
    stores = [opened(60.0, sms)[0]._group.store for sms in (2, 2, 4)]
    assert stores == ["round 0/network/1", "round 1/network/1", "round 2/network/1"]


@pytest.mark.parametrize("refuses", [False, True])
def test_twins_that_not_all_have_connected_leave_nothing_open(monkeypatch: pytest.MonkeyPatch, refuses: bool) -> None:
    """NCCL refuses this rank, or a peer reports an error, or does not come."""
    made: list[Group] = []

    class Made(Group):
        Options = dist.ProcessGroupNCCL.Options

        def eager_connect_single_device(self, device: torch.device) -> None:
            made.append(self)
            if refuses:
                raise RuntimeError("no socket")

    def all_succeed(error: str | None, what: str) -> None:
        assert (error is not None) == refuses and not made[0].told
        raise OverlapTimeoutError("rank 5")

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Made)
    same: Callable[[str], str] = str
    agreement: Any = SimpleNamespace(
        barrier=same, store_of=same, name_of=same, all_succeed=all_succeed,
        callers=lambda ranks: Callers(TOPOLOGY.rank, tuple(ranks), 60.0),
    )  # fmt: skip
    threads = set(threading.enumerate())
    with pytest.raises(OverlapTimeoutError, match="rank 5"):
        nccl.NcclTransport(agreement, TOPOLOGY, CPU, 60.0, FaultRecord(CPU, TOPOLOGY.rank, 60.0), 6)
    assert made[0].told == ["abort"] and threads.issuperset(threading.enumerate())


def wait_until(ready: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.mark.parametrize("kind", [GATHER, A2A_GEMM])
def test_an_exchange_that_does_not_end_is_named_and_ended(opened: Callable[[float], Any], kind: str) -> None:
    transport, fault = opened(0.05)
    exchange(transport, kind=kind)
    wait_until(lambda: "abort" in transport._group.told)
    named = r"rank 3 of node 1 waited 0\.05 s to send to rank 5 of node 2 and to receive from rank 1 of node 0"
    with pytest.raises(OverlapTimeoutError, match=named):
        fault.check()
    with pytest.raises(OverlapTimeoutError):
        exchange(transport)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds, as the transport sees it."""
    seconds = [0.0]
    monkeypatch.setattr(nccl, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


def looked(work: Work) -> None:
    """Return when a transport has looked at this exchange, and done what it then does."""
    before = work.asked
    wait_until(lambda: work.asked > before + 1)


def test_time_behind_other_work_of_the_stream_does_not_count(
    opened: Callable[[float], Any], now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Event, "reached", False)
    transport, fault = opened(60.0)
    exchange(transport)
    looked(transport._group.works[0])
    now[0] = 1000.0
    looked(transport._group.works[0])
    fault.check()
    EVENTS[0].reached = True
    looked(transport._group.works[0])
    now[0] = 1059.0
    looked(transport._group.works[0])
    fault.check()
    now[0] = 1061.0
    assert_given_up(transport, fault)


def test_time_behind_another_exchange_does_not_count(opened: Callable[[float], Any], now: list[float]) -> None:
    transport, fault = opened(60.0)
    exchange(transport)
    exchange(transport)
    first, second = transport._group.works
    looked(first)
    now[0], first.done = 50.0, True
    looked(second)
    now[0] = 100.0
    looked(second)
    fault.check()
    now[0] = 111.0
    assert_given_up(transport, fault)


def test_an_exchange_of_a_gpu_that_has_failed_has_a_limit_too(
    opened: Callable[[float], Any], now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Event, "query", mock.Mock(side_effect=RuntimeError("an illegal memory access")))
    transport, fault = opened(60.0)
    exchange(transport)
    looked(transport._group.works[0])
    now[0] = 61.0
    assert_given_up(transport, fault)


def assert_given_up(transport: nccl.NcclTransport, fault: FaultRecord) -> None:
    wait_until(lambda: "abort" in transport._group.told)
    with pytest.raises(OverlapTimeoutError, match=r"waited 60 s to send to rank 5"):
        fault.check()


def test_exchanges_that_have_ended_are_forgotten(opened: Callable[[float], Any]) -> None:
    transport, fault = opened(0.1)
    exchange(transport)
    transport._group.works[0].done = True
    wait_until(lambda: not transport._under_way)
    time.sleep(0.2)
    fault.check()
    assert "abort" not in transport._group.told


def test_a_wait_that_gave_up_on_the_device_ends_what_is_under_way(opened: Callable[[float], Any]) -> None:
    """Or the streams would hang, and with them the host, before it could raise the error of that wait."""
    from overlap_train.kernels.signal_words import FAULT_SET

    transport, fault = opened(60.0)
    exchange(transport)
    fault.record[FAULT_SET] = 1
    wait_until(lambda: "abort" in transport._group.told)


def test_it_ends_once(opened: Callable[[float], Any]) -> None:
    transport, _ = opened(60.0)
    transport.close(orderly=True)
    transport.close(orderly=False)
    assert transport._group.told == ["connect", "shutdown"]
