"""How many SMs the sum of a node gets: worked out from what it reaches and what the network takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from overlap_train.nodes import sums as node_sums
from overlap_train.schedule.order import Topology

CPU, BF16, EIGHT = torch.device("cpu"), torch.bfloat16, Topology(2, 8, 0)
H100 = {1: 61.0, 4: 235.0, 8: 446.0, 16: 818.0, 32: 1341.0}  # GB/s of 8 blocks by so many CTAs


def reached(sms: int) -> float:
    """As on an H100, with a straight line between what was measured."""
    low, high = max(s for s in H100 if s <= sms), min(s for s in H100 if s >= sms)
    part = (sms - low) / (high - low) if high > low else 0.0
    return H100[low] + part * (H100[high] - H100[low])


@pytest.mark.parametrize("needed", [1.0, 61.0, 62.0, 225.0, 446.0, 450.0, 900.0, 1341.0])
def test_the_fewest_that_are_as_fast_as_the_network(needed: float) -> None:
    sms, gbs = node_sums.fewest_sms(needed, reached, 32)
    assert gbs == reached(sms) >= needed
    assert sms == 1 or reached(sms - 1) < needed


def test_sums_never_take_more_than_communication_may_have() -> None:
    tried: list[int] = []
    assert node_sums.fewest_sms(5000.0, lambda sms: tried.append(sms) or reached(sms), 16) == (16, 818.0)
    assert tried == [1, 16]
    assert node_sums.fewest_sms(100.0, lambda sms: 10.0, 16) == (16, 10.0), "more that bring nothing end, too"


class Probe:
    """A stand-in that reaches as much as an H100."""

    def __init__(self, device: torch.device, local: int) -> None:
        assert local == EIGHT.local

    def gbs(self, sms: int) -> float:
        return reached(sms)


def settle(rank: int = 0, slower: float = 1.0, topology: Topology = EIGHT, sms: int = 0, most: int = 20) -> int:
    """With a peer that reaches `slower` times as much. The network carries 50 GB/s."""
    agreement: Any = SimpleNamespace(rank=rank, exchange=lambda mine, what: [mine, slower * mine])
    with mock.patch.object(node_sums, "SumProbe", Probe):
        return node_sums.settle(agreement, topology, CPU, 50.0, sms, most)


def test_all_ranks_take_what_the_slowest_needs_and_one_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert settle() == 9
    assert capsys.readouterr().err == (
        "overlap_train: sums of a node read and write 492.5 GB/s on 9 SMs; the network takes 450.0 (see reduce_sms)\n"
    )
    assert settle(rank=1, slower=0.5) == 19, "of which the slower one reaches 458"
    assert capsys.readouterr().err == ""
    assert settle(most=7) == 7
    assert "on 7 SMs, the most that they may have; the network takes 450.0 (see reduce_sms)" in capsys.readouterr().err


def test_a_setting_is_taken_and_nothing_is_measured_where_nothing_is_added(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(node_sums, "SumProbe", side_effect=AssertionError("measured")):
        assert node_sums.settle(mock.Mock(), EIGHT, CPU, 50.0, 6, 3) == 6
        assert node_sums.settle(mock.Mock(), Topology(4, 1, 0), CPU, 50.0, 0, 9) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("size", "dtype", "count", "sms", "grid"),
    [
        (1 << 20, BF16, 7, 8, (8, 32768)), (1 << 20, BF16, 8, 64, (32, 32768)), (1 << 20, BF16, 9, 8, (8, 16384)),
        (1 << 20, BF16, 7, 0, (64, 16384)), (1 << 20, torch.float32, 7, 8, (8, 16384)), (100_000, BF16, 1, 8, (4, 32768)),
        (1 << 20, torch.float32, 1, 0, (128, 8192)), (1000, BF16, 1, 8, (1, 1024)), (1, torch.float32, 1, 0, (1, 1)),
    ],
)  # fmt: skip
def test_a_program_holds_an_sm_and_there_are_no_more_than_have_something_to_add(
    size: int, dtype: torch.dtype, count: int, sms: int, grid: tuple[int, int]
) -> None:
    assert node_sums.grid_of(torch.empty(size, dtype=dtype), count, sms) == grid
