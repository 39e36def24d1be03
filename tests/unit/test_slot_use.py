"""Which slots are free, by the rule that a rank which has received operator n knows that all are done with operator n - 1."""

from __future__ import annotations

import random

import pytest

from overlap_train.group.slots import SLOTS
from overlap_train.group.workspace import SlotUse

# calls of each operator of a layer: forward of column, row, column, row; backward of row, column, row, column
LAYER = [1, 1, 1, 1, 1, 2, 1, 2]


def barriers(operators: list[int]) -> int:
    """How many a sequence of operators with so many calls each needs; checks every slot that is taken."""
    use, met, needed = SlotUse(), -1, 0
    users = dict.fromkeys(range(SLOTS), -1)  # the operator that used a slot last, numbered as this test does
    for number, calls in enumerate(operators):
        use.begin()
        if len(use.free()) < calls:
            use.clear()
            needed += 1
            met = number
        for _ in range(calls):
            slot = use.take()
            before = operators[
                users[slot] + 1 : number
            ]  # operators with calls between: one of them must have been received
            assert users[slot] < met or users[slot] == -1 or any(before), f"operator {number} takes {slot} too early"
            users[slot] = number
    return needed


@pytest.mark.parametrize(
    "operators",
    [LAYER * 5, LAYER[:4] * 9 + LAYER[4:] * 9, [1] * 20, [0, 1] * 20, [2, 1] * 10, [1, 0, 2, 0] * 10],
    ids=["layers", "in-flight micro-batches", "one kind only", "collective between", "output layer", "all kinds"],
)
def test_what_training_does_needs_no_barrier(operators: list[int]) -> None:
    assert barriers(operators) == 0


def test_two_calls_after_two_need_one_every_time() -> None:
    assert barriers([2] * 10) == 9


def test_an_operator_without_calls_tells_nothing() -> None:
    """It has received nothing, so the slots of the one before are not free behind it."""
    assert barriers([2, 0, 2]) == 1


def test_no_slot_is_taken_too_early_in_any_sequence() -> None:
    pick = random.Random(0)
    assert sum(barriers([pick.choice((0, 1, 2)) for _ in range(30)]) for _ in range(300)) > 300


def test_after_an_operator_that_raised_no_slot_is_free_before_ranks_meet() -> None:
    use = SlotUse()
    for _ in range(3):
        use.begin()
        use.take()
    use.invalidate()
    use.begin()
    assert use.free() == []
    use.clear()
    assert use.take() == 0


def test_calls_stay_with_few_slots() -> None:
    """Addresses are worked out once for each slot: the fewer a kind of call meets, the better."""
    use = SlotUse()
    taken = []
    for _ in range(10):
        use.begin()
        taken.append(use.take())
    assert taken == [0, 1] * 5


def in_parts(use: SlotUse, count: int) -> tuple[list[int], list[bool]]:
    """A pass in parts, of which the next begins before one is read: the slots, and where first blocks had to come before."""
    use.begin()
    taken, waits = [use.take()], []
    for _ in range(count - 1):
        waits.append(not use.free())
        if waits[-1]:
            use.receive()
        use.begin_ahead()
        taken.append(use.take())
        use.begin()
    return taken, waits


def test_parts_that_begin_ahead_take_three_slots_in_turn() -> None:
    """What is sent, what is read, and what a peer may still read."""
    assert in_parts(SlotUse(), 7) == ([0, 1, 2, 0, 1, 2, 0], [False, False, True, True, True, True])


@pytest.mark.parametrize(("calls", "barrier"), [(1, False), (2, True)])
def test_after_parts_that_began_ahead_one_slot_is_free(calls: int, barrier: bool) -> None:
    use = SlotUse()
    in_parts(use, 4)
    use.begin()
    assert (len(use.free()) < calls) == barrier and use.free()[0] == 1, "the last two parts have slots 2 and 0"


def test_after_two_calls_the_second_part_waits_for_the_first_blocks_of_the_first() -> None:
    use = SlotUse()
    use.begin()
    assert [use.take(), use.take()] == [0, 1]
    assert in_parts(use, 3) == ([2, 0, 1], [True, False])


def test_what_began_ahead_of_an_operator_that_raised_does_not_go_on() -> None:
    use = SlotUse()
    in_parts(use, 2)
    use.begin_ahead()
    use.take()
    use.invalidate()
    assert not use.is_ahead
    use.begin()
    assert use.free() == []
