"""How the twins of several nodes meet by gloo, which is a stand-in, and what is left where they do not."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from overlap_train.nodes import gloo
from overlap_train.schedule.order import Topology
from overlap_train.symmetric.agreement import OverlapTimeoutError

ALONE = Topology(1, 2, 1)  # no receivers


class Group:
    """Of gloo."""

    def __init__(self, store: str, *_: Any) -> None:
        self.store = store
        MADE.add(self)


MADE: weakref.WeakSet[Group] = weakref.WeakSet()  # those that are still there


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., gloo.GlooTransport]:
    """Makes a transport, after the ranks have met once more. theirs: what a peer reports."""
    monkeypatch.setattr(dist, "ProcessGroupGloo", Group)
    rounds: list[str] = []

    def make(theirs: Exception | None = None) -> gloo.GlooTransport:
        def all_succeed(error: str | None, what: str) -> None:
            if theirs is not None:
                raise theirs

        agreement: Any = SimpleNamespace(
            barrier=rounds.append, store_of=str, name_of=lambda what: f"{len(rounds)}/{what}", all_succeed=all_succeed
        )
        return gloo.GlooTransport(agreement, ALONE, 60.0)

    return make


def test_twins_meet_in_another_place_after_each_failure(opened: Callable[..., gloo.GlooTransport]) -> None:
    """The addresses of a group that is gone are still in the first one."""
    assert [opened()._group.store for _ in range(2)] == ["1/network/1", "2/network/1"]


def test_a_group_that_not_all_have_connected_is_gone(opened: Callable[..., gloo.GlooTransport]) -> None:
    """Although who catches the error holds the frames that it has passed."""
    MADE.clear()
    with pytest.raises(OverlapTimeoutError) as raised:
        opened(OverlapTimeoutError("rank 5"))
    assert raised.tb is not None and not MADE
