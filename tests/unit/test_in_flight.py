"""When exchanges start and arrive: engines and planner take the same steps, so these are written out here once."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from overlap_train.schedule.inter_node import START, InFlight, Step, most_in_flight
from overlap_train.schedule.order import A2A_GEMM, GATHER, GEMM_A2A, SCATTER


def short(steps: Iterable[Step]) -> str:
    """Exchanges that start, +0, and that arrive, -0."""
    return " ".join(f"{'+' if what == START else '-'}{number}" for what, number in steps)


def test_of_a_scatter_all_may_be_under_way_of_others_two() -> None:
    assert [most_in_flight(kind, 7) for kind in (SCATTER, GATHER, A2A_GEMM, GEMM_A2A)] == [7, 2, 2, 2]


def test_the_oldest_arrives_before_a_third_starts() -> None:
    flight = InFlight(4, 2)
    assert [short(flight.start()) for _ in range(4)] == ["+0", "+1", "-0 +2", "-1 +3"]
    assert short(flight.finish()) == "-2 -3"


def test_one_more_is_started_before_one_is_waited_for() -> None:
    flight = InFlight(4, 2)
    assert short(flight.bring(1)) == "+0 +1 -0"
    assert short(flight.bring(1)) == ""
    assert short(flight.bring(3)) == "+2 -1 +3 -2"
    assert short(flight.bring(4)) == "-3", "there is no more to start"
    with pytest.raises(AssertionError, match="exchange 5 of 4"):
        list(flight.bring(5))


def test_a_chunk_of_all_ranks_is_brought_whole() -> None:
    flight = InFlight(6, 2)  # three ranks' two chunks
    assert short(flight.bring_chunk(0, chunks=2)) == "+0 +1 -0 +2 -1 +3 -2"
    assert short(flight.bring_chunk(1, chunks=2)) == "+4 -3 +5 -4 -5"


def test_exchanges_go_ahead_as_far_as_the_product() -> None:
    flight = InFlight(4, 4)
    assert [short(flight.go_ahead(done, 8)) for done in range(9)] == ["+0", "", "+1", "", "+2", "", "+3", "", ""]


def test_the_end_starts_what_is_left_and_lets_all_arrive() -> None:
    assert short(InFlight(3, 2).finish()) == "+0 +1 -0 +2 -1 -2"
    assert short(InFlight(3, 3).finish()) == "+0 +1 +2 -0 -1 -2"
    assert short(InFlight(0, 0).finish()) == ""


def test_a_step_counts_as_taken_when_the_next_is_asked_for() -> None:
    """What raises while a step is taken leaves it undone: it is not waited for."""
    flight = InFlight(4, 2)
    steps = flight.start_until(3)
    assert next(steps) == (START, 0) and flight.started == 0
    assert next(steps) == (START, 1) and flight.started == 1
    assert short(flight.arrive()) == "-0", "only what has started"
