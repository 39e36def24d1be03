"""Which slots are free, by the rule that a rank which has received operator n knows that all are done with operator n - 1."""

from __future__ import annotations

import random

import pytest

from overlap_train.layout import SLOTS
from overlap_train.turns import Turns

# calls of each operator of a layer: forward of column, row, column, row; backward of row, column, row, column
LAYER = [1, 1, 1, 1, 1, 2, 1, 2]


def barriers(operators: list[int]) -> int:
    """How many a sequence of operators with so many calls each needs; checks every slot that is taken."""
    turns, met, needed = Turns(), -1, 0
    users = dict.fromkeys(range(SLOTS), -1)  # the operator that used a slot last, numbered as this test does
    for number, calls in enumerate(operators):
        turns.begin()
        if len(turns.free()) < calls:
            turns.clear()
            needed += 1
            met = number
        for _ in range(calls):
            slot = turns.take()
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
    assert any(barriers([pick.choice((0, 1, 2)) for _ in range(30)]) for _ in range(300))


def test_turns_stay_with_few_slots() -> None:
    """Addresses are worked out once for each slot: the fewer a kind of call meets, the better."""
    turns = Turns()
    taken = []
    for _ in range(10):
        turns.begin()
        taken.append(turns.take())
    assert taken == [0, 1] * 5
