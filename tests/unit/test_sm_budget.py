"""How many SMs communication between nodes of GPUs may hold: 16 in all, if no setting says more."""

from __future__ import annotations

import pytest

from overlap_train.select.sm_budget import MOST_SMS, WAIT_SMS, SmBudget, in_words

MOST = 16


@pytest.mark.parametrize("local", [1, 2, 8])
@pytest.mark.parametrize("reduce_sms", [0, 1, 2, 3, 6, 7, 12, 13])
def test_the_three_never_hold_more_than_sixteen(local: int, reduce_sms: int) -> None:
    """However much of its share NCCL takes."""
    budget = SmBudget(local, reduce_sms=reduce_sms)
    assert budget.for_network >= 2 and budget.for_network % 2 == 0
    for network in range(0, budget.for_network + 1, 2):
        sums = budget.for_sums(network) if local > 1 else 0
        assert network + sums + WAIT_SMS <= MOST == MOST_SMS
        assert reduce_sms or local == 1 or network + sums + WAIT_SMS == MOST, "what NCCL leaves is for sums"


@pytest.mark.parametrize(
    ("budget", "network"),
    [
        (SmBudget(1), 14), (SmBudget(1, reduce_sms=9), 14), (SmBudget(8), 8), (SmBudget(8, reduce_sms=3), 12),
        (SmBudget(8, reduce_sms=14), 2),
    ],
)  # fmt: skip
def test_nccl_leaves_half_to_sums_whose_number_is_not_set(budget: SmBudget, network: int) -> None:
    assert budget.for_network == network


def test_settings_hold_as_they_are() -> None:
    budget = SmBudget(8, network_sms=20, reduce_sms=30)
    assert (budget.for_network, budget.for_sums(20)) == (20, 30)
    assert SmBudget(8, network_sms=20).for_sums(20) == 7, "a sum that starves would hold up what NCCL sends"
    assert SmBudget(8, network_sms=5).for_sums(5) == 10


def test_what_is_held_is_said_and_why_it_may_be_more() -> None:
    assert in_words(6, 9) == (
        "communication between nodes holds 16 SMs (at most 16): NCCL 6, sums of a node 9, waits 1"
    )
    assert "holds 51 SMs (more than 16, by network_sms or reduce_sms): NCCL 20" in in_words(20, 30)
