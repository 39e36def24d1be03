"""How many SMs NCCL gets between nodes, on stand-ins for NCCL and for the wire."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from overlap_train import OverlapConfig
from overlap_train.group.domain import OverlapDomain
from overlap_train.nodes import wire
from overlap_train.nodes import wire as bursts
from overlap_train.nodes.streams import NodeStreamEngine
from overlap_train.schedule.order import Topology
from overlap_train.select.sm_budget import SmBudget
from overlap_train.symmetric.agreement import OverlapTimeoutError

CPU, TOPOLOGY = torch.device("cpu"), Topology(2, 2, 0)


class Network:
    """A stand-in for a transport of so many SMs. open: not yet closed. orderly: how it was closed."""

    def __init__(self, sms: int) -> None:
        self.sms, self.open, self.crossed, self.orderly = sms, True, 0, True

    def exchange(self, crossing: Any, sent: Any, received: Any) -> Any:
        assert (crossing.sent.target, crossing.received.source) == (2, 2) and sent.data.numel() == 32 << 20
        self.crossed += 1
        return SimpleNamespace(arrive=lambda: None)

    def close(self, orderly: bool) -> None:
        if self.open:
            self.open, self.orderly = False, orderly


class Made:
    """Makes networks, and keeps them."""

    def __init__(self) -> None:
        self.networks: list[Network] = []

    def __call__(self, sms: int) -> Any:
        self.networks.append(Network(sms))
        return self.networks[-1]


@pytest.mark.parametrize(
    ("gbs", "tried", "taken"),
    [
        ((2.0, 2.0), (2, 4), 2),  # sockets
        ((20.0, 40.0, 41.9), (2, 4, 8), 4),
        ((20.0, 40.0, 42.0, 43.0), (2, 4, 8, 14), 8),
        ((20.0, 40.0, 80.0, 160.0), (2, 4, 8, 14), 14),
    ],
)
def test_the_fewest_sms_with_which_the_wire_carries_what_it_can(
    gbs: Sequence[float], tried: Sequence[int], taken: int
) -> None:
    by, rates = Made(), iter(gbs)
    network, carried = wire.connect_with_fewest_sms(by, lambda network: next(rates), wire.counts_of(SmBudget(1)))
    assert tuple(one.sms for one in by.networks) == tried
    assert network.sms == taken and carried == gbs[tried.index(taken)]
    assert [one.sms for one in by.networks if one.open] == [taken]


def agreement(rank: int, gbs: Sequence[float]) -> Any:
    """The others' figures of each measurement."""
    theirs = iter(gbs)
    return SimpleNamespace(rank=rank, exchange=lambda mine, what: [mine, next(theirs)])


def connect(
    rank: int, sms: int, own: Sequence[float], others: Sequence[float], fails: bool = False, gbs: float | None = None,
    made: Made | None = None,
) -> Made:  # fmt: skip
    """gbs: what is carried in the end. made: makes the networks."""
    by, failure = made or Made(), OverlapTimeoutError("rank 3 does not come") if fails else None
    failures: Any = SimpleNamespace(check=mock.Mock(side_effect=failure))
    with mock.patch.object(wire, "_gbs", side_effect=list(own)):
        network, carried = wire.connect(agreement(rank, others), TOPOLOGY, CPU, SmBudget(2, sms), by, failures)
    assert [one for one in by.networks if one.open] == [network] and carried == (gbs or carried)
    return by


def test_the_slowest_rank_decides_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    found = connect(0, 0, own=(20.0, 40.0, 50.0), others=(20.0, 30.0, 30.0), gbs=30.0)
    assert [one.sms for one in found.networks if one.open] == [4]
    assert capsys.readouterr().err == (
        "overlap_train: NCCL between nodes carries 30.0 GB/s in each direction, and takes 4 SMs for it (see network_sms)\n"
    )
    connect(1, 0, own=(20.0, 20.0), others=(20.0, 20.0))
    assert capsys.readouterr().err == ""  # rank 0 alone says so


def test_a_setting_is_taken_as_it_is_and_what_it_carries_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Sums go by it."""
    assert [one.sms for one in connect(0, 6, own=(20.0,), others=(18.0,), gbs=18.0).networks] == [6]
    assert "carries 18.0 GB/s in each direction, and takes 6 SMs for it" in capsys.readouterr().err


def test_it_says_that_more_might_carry_more(capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes of two ranks keep SMs for their sums."""
    rates = (20.0, 40.0, 80.0, 160.0)
    assert [one.sms for one in connect(0, 0, own=rates, others=rates, gbs=80.0).networks] == [2, 4, 8]
    assert "and takes 8 SMs for it, the most that it may have (see network_sms)" in capsys.readouterr().err
    connect(0, 8, own=rates, others=rates)
    assert "takes 8 SMs for it (see network_sms)" in capsys.readouterr().err, "which a setting is not"


@pytest.mark.parametrize("sms", [0, 6])
def test_an_exchange_that_did_not_end_is_no_measurement(sms: int) -> None:
    """And its network does not stay open: a thread would watch it for good."""
    made = Made()
    with pytest.raises(OverlapTimeoutError, match="rank 3"):
        connect(0, sms, own=(1.0,), others=(1.0,), fails=True, made=made)
    assert [(one.open, one.orderly) for one in made.networks] == [(False, False)]


def test_no_network_stays_open_where_the_next_one_fails() -> None:
    """It could not be connected, or not be measured."""
    made = Made()
    with pytest.raises(StopIteration):
        connect(0, 0, own=(20.0, 40.0), others=(20.0,), made=made)
    assert [(one.open, one.orderly) for one in made.networks] == [(False, False)] * 2

    def refuse(sms: int) -> Any:
        if sms > wire.COUNTS[0]:
            raise RuntimeError("no socket")
        return Made.__call__(made, sms)

    made.networks.clear()
    with pytest.raises(RuntimeError, match="no socket"):
        connect(0, 0, own=(20.0,), others=(20.0,), made=refuse)  # type: ignore[arg-type]
    assert [(one.open, one.orderly) for one in made.networks] == [(False, False)]


@pytest.mark.parametrize(
    ("changed", "sms"),
    [
        ({}, 8), ({"on_gpu": False}, 0), ({"topology": Topology(1, 4, 0)}, 0), ({"is_capturing": lambda: True}, 0),
        ({"is_capturing": lambda: True, "is_connected": True}, 8),
    ],
)  # fmt: skip
def test_plans_spare_the_sms_that_were_found(changed: dict[str, Any], sms: int) -> None:
    """And nothing is connected where nothing goes over the network, or where it could not be."""
    engine = mock.Mock(spec=NodeStreamEngine, network=Network(8), reduce_sms=5)
    connect = mock.Mock(return_value=engine)
    own = {"on_gpu": True, "topology": TOPOLOGY, "is_capturing": lambda: False, "is_connected": False}
    domain: Any = SimpleNamespace(**(own | changed), engine_across_nodes=connect)
    assert OverlapDomain.settled(domain, OverlapConfig()) == OverlapConfig(network_sms=sms, reduce_sms=5 * bool(sms))
    assert connect.called == bool(sms)


@pytest.mark.parametrize(("engine", "gbs"), [(mock.Mock(spec=NodeStreamEngine, gbs=2.5), 2.5), (mock.Mock(), 0.0)])
def test_plans_know_what_the_network_carries(engine: Any, gbs: float) -> None:
    """Before the nodes are connected the domain has another engine, and nothing is known."""
    domain: Any = SimpleNamespace(engine=engine)
    assert OverlapDomain.network_gbs.fget(domain) == gbs  # type: ignore[attr-defined]


def test_exchanges_are_timed_once_the_twins_have_met() -> None:
    """And the best of four bursts counts: a wire that others use is slow at times."""
    network, times = Network(2), iter((0.0, 7.0, 10.0, 10.9, 11.0, 11.5, 12.0, 12.8, 13.0, 14.0))
    stream = SimpleNamespace(synchronize=lambda: None)
    with (
        mock.patch.object(bursts.time, "perf_counter", side_effect=times),
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
    ):
        gbs = wire._gbs(TOPOLOGY, CPU, network)  # type: ignore[arg-type]
    assert network.crossed == 17 and gbs == pytest.approx(4 * (32 << 20) / 0.5e9)
