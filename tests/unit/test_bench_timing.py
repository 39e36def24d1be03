"""Medians, paces, the order of calls, and the maximum over real processes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_train.tools.measure.timing import Pace, Timing, input_sets, measure, median, pace, worst_over_ranks
from tests.processes import run_ranks, values

CPU = torch.device("cpu")


def test_the_median_is_taken_of_each_figure_on_its_own() -> None:
    assert median([Timing(1.0, 30.0), Timing(9.0, 10.0), Timing(2.0, 20.0)]) == Timing(2.0, 20.0)


@pytest.mark.parametrize(("flops", "burst"), [(2.4e11, 11), (3.6e12, 3), (1e9, 16)])
def test_bursts_are_longer_for_smaller_products(flops: float, burst: int) -> None:
    assert pace(flops) == Pace(5, burst)
    assert pace(flops, quick=True).rounds * pace(flops, quick=True).burst <= 5 * burst / 2 + 3


@pytest.mark.parametrize("quick", [False, True])
def test_rounds_that_are_asked_for_change_no_burst(quick: bool) -> None:
    assert pace(2.4e11, quick, rounds=25) == Pace(25, pace(2.4e11, quick).burst)


@pytest.mark.parametrize("quick", [False, True])
def test_bursts_are_as_long_as_asked_for(quick: bool) -> None:
    """At 650 TFLOP/s 6.5e11 take 1 ms."""
    assert pace(6.5e11, quick, burst_ms=500) == Pace(3 if quick else 5, 500)
    assert pace(6.5e13, quick, rounds=2, burst_ms=100) == Pace(2, 3)


@pytest.mark.parametrize(("mib", "sets"), [(30, 4), (60, 2), (121, 1), (1, 8)])
def test_small_inputs_rotate_until_they_exceed_the_cache(mib: int, sets: int) -> None:
    assert input_sets(mib << 20) == sets


def _measure(rank: int, world: int) -> Any:
    log: list[tuple[str, int]] = []
    calls = {name: lambda index, name=name: log.append((name, index)) for name in "abcd"}
    timings = measure(calls, Pace(rounds=5, burst=2), dist.group.WORLD, CPU)
    worst = worst_over_ranks({"x": Timing(1.0 + rank, 5.0 - rank)}, dist.group.WORLD, CPU)
    return log, list(timings), worst


def test_calls_take_turns_and_the_slowest_rank_counts() -> None:
    (log, names, worst), (log_1, _, worst_1) = values(run_ranks(2, _measure))
    assert log == log_1, "all ranks in the same order"
    bursts = [log[first : first + 3] for first in range(0, len(log), 3)]
    assert all(burst == [(name, 2), (name, 0), (name, 1)] for burst in bursts for name, _ in burst[:1]), "one not timed"
    order = [burst[0][0] for burst in bursts]
    rounds = [order[first : first + 4] for first in range(0, len(order), 4)]
    assert [sorted(turn) for turn in rounds] == [["a", "b", "c", "d"]] * 5
    followed = {(one, other) for turn in rounds for one, other in pairwise(turn)}
    assert all(len({one for one, other in followed if other == name}) > 1 for name in "abcd"), (
        "nobody has one neighbour"
    )
    assert names == ["a", "b", "c", "d"]
    assert worst == worst_1 == {"x": Timing(2.0, 5.0)}
