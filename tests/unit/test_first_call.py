"""What a rank hears, and raises, at the first call with some shapes."""

from __future__ import annotations

from typing import Any

import pytest

from overlap_train.group.memory import FirstCall, Request, ask
from overlap_train.symmetric.agreement import OverlapMismatchError, OverlapTimeoutError

WHAT, WRONG = "fc1: agree on its first call", "fc1: w has 3 rows"
REQUEST = Request("all_gather_linear", "x 4 x 8", 0)


class Agreement:
    """Rank 0 of two; what the other one says, or what is raised instead."""

    rank = 0

    def __init__(self, heard: FirstCall | Exception) -> None:
        self.heard = heard

    def exchange(self, mine: Any, what: str, kind: str = "") -> list[Any]:
        assert (what, kind) == (WHAT, "first call")
        if isinstance(self.heard, Exception):
            raise self.heard
        return [mine, self.heard]


def said(problem: str | None) -> FirstCall:
    return FirstCall(problem, REQUEST, "", "fc1")


def hear(mine: FirstCall, heard: FirstCall | Exception) -> None:
    ask(Agreement(heard), mine, WHAT)  # type: ignore[arg-type]


def test_equal_calls_pass() -> None:
    hear(said(None), said(None))


def test_a_peers_problem_is_raised_with_its_rank() -> None:
    with pytest.raises(ValueError, match=rf"^{WRONG} \(on rank 1 of the group\)$"):
        hear(said(None), said(WRONG))


@pytest.mark.parametrize(
    "unheard", [OverlapTimeoutError("rank 1 is late"), OverlapMismatchError("rank 1 is elsewhere")]
)
def test_a_rank_that_nobody_heard_names_its_own_problem(unheard: Exception) -> None:
    """Its peers are in a call that they know. In 600 seconds it must not have become one that was late."""
    with pytest.raises(ValueError, match=f"^{WRONG}$") as raised:
        hear(said(WRONG), unheard)
    assert raised.value.__cause__ is unheard
    with pytest.raises(type(unheard), match="rank 1"):
        hear(said(None), unheard)
