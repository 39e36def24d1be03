"""How many SMs communication between nodes gets, on stand-ins for NCCL, the wire and a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from overlap_train.nodes import measure
from overlap_train.nodes.sm_budget import MOST_SMS, WAIT_SMS, SmBudget
from overlap_train.schedule.order import Topology
from overlap_train.select.system import H200
from overlap_train.symmetric.agreement import OverlapTimeoutError

CPU = torch.device("cpu")


class Network:
    """A stand-in for a transport of so many SMs."""

    def __init__(self, sms: int) -> None:
        self.sms, self.open = sms, True

    def close(self, orderly: bool) -> None:
        self.open = False


class Made:
    """Makes networks, and keeps them."""

    def __init__(self) -> None:
        self.networks: list[Network] = []

    def __call__(self, sms: int) -> Any:
        self.networks.append(Network(sms))
        return self.networks[-1]

    @property
    def left(self) -> list[int]:
        return [one.sms for one in self.networks if one.open]


@pytest.mark.parametrize(
    ("gbs", "tried", "taken"),
    [
        ((2.0, 2.0), (2, 4), 2),  # sockets
        ((20.0, 40.0, 41.9), (2, 4, 8), 4),
        ((20.0, 40.0, 42.0, 43.0), (2, 4, 8, 14), 8),
        ((20.0, 40.0, 80.0, 160.0), (2, 4, 8, 14), 14),
    ],
)
def test_nccl_gets_the_fewest_with_which_the_wire_carries_what_it_can(
    gbs: Sequence[float], tried: Sequence[int], taken: int
) -> None:
    by = Made()
    assert connected(0, 0, gbs, gbs, by, local=1) == gbs[tried.index(taken)] and by.left == [taken]
    assert tuple(one.sms for one in by.networks) == tried


def connected(
    rank: int, sms: int, own: Sequence[float], others: Sequence[float], by: Made, late: bool = False, local: int = 2
) -> float:
    """What is carried in the end, where this rank and another one measure so many GB/s."""
    theirs = iter(others)
    agreement: Any = SimpleNamespace(rank=rank, exchange=lambda mine, what: [mine, next(theirs)])
    failures: Any = mock.Mock(**{"check.side_effect": OverlapTimeoutError("rank 3 does not come") if late else None})
    with mock.patch.object(measure, "_gbs", side_effect=list(own)):
        return measure.connect(agreement, Topology(2, 2, 0), CPU, SmBudget(local, sms), by, failures)[1]


def test_the_slowest_rank_decides_for_all_and_rank_0_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    by = Made()
    assert connected(0, 0, (20.0, 40.0, 50.0), (20.0, 30.0, 30.0), by) == 30.0 and by.left == [4]
    said = "NCCL between nodes carries 30.0 GB/s in each direction, and takes 4 SMs for it (see network_sms)"
    assert said in capsys.readouterr().err
    connected(1, 0, (20.0, 20.0), (20.0, 20.0), Made())
    assert capsys.readouterr().err == ""
    by = Made()
    assert connected(0, 6, (20.0,), (18.0,), by) == 18.0 and by.left == [6], "a setting holds"
    rates = (20.0, 40.0, 80.0)
    connected(0, 0, rates, rates, Made())
    assert "takes 8 SMs for it, the most that it may have" in capsys.readouterr().err, "nodes of two ranks add, too"


def test_no_network_stays_open_where_one_fails() -> None:
    by = Made()
    with pytest.raises(OverlapTimeoutError, match="rank 3"):
        connected(0, 0, (1.0,), (1.0,), by, late=True)
    with pytest.raises(StopIteration):
        connected(0, 0, (20.0, 40.0), (20.0,), by)
    assert len(by.networks) == 3 and not by.left


@pytest.mark.parametrize("local", [1, 2, 8])
@pytest.mark.parametrize("reduce_sms", [0, 1, 2, 3, 6, 7, 12, 13])
def test_all_together_never_hold_more_than_sixteen_but_by_a_setting(local: int, reduce_sms: int) -> None:
    budget = SmBudget(local, reduce_sms=reduce_sms)
    assert budget.for_network >= 2 and budget.for_network % 2 == 0
    for network in range(0, budget.for_network + 1, 2):
        sums = budget.for_sums(network, 400.0, H200.sum_sm_gbs) if local > 1 else 0
        assert network + sums + WAIT_SMS <= MOST_SMS == 16
    set_ = SmBudget(8, network_sms=20, reduce_sms=30)
    assert (set_.for_network, set_.for_sums(20, 50.0, H200.sum_sm_gbs)) == (20, 30)
