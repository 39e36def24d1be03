"""The bracket of an operator that cannot begin: whatever it has pushed is joined, and no slot counts as free."""

from __future__ import annotations

import contextlib
import threading
from unittest.mock import Mock

import pytest

from overlap_train import OverlapTimeoutError
from overlap_train.group import domain as bracket
from overlap_train.group.domain import Operator
from overlap_train.group.signals import Tag


def test_a_begin_that_raises_ends_as_the_operator_would() -> None:
    domain = Mock()
    domain.workspace.use.is_ahead = False
    domain.workspace.begin.side_effect = RuntimeError("the CUDA driver refused")
    with pytest.raises(RuntimeError, match="refused"):
        Operator(domain, Tag("fc1/dgrad", ""), 2, True, "").__enter__()
    domain.engine.join.assert_called_once_with()
    domain.workspace.use.invalidate.assert_called_once_with()
    domain.in_use.release.assert_called_once_with()


def test_a_second_thread_in_the_same_group_is_refused() -> None:
    domain = Mock(in_use=threading.RLock())
    errors: list[str] = []

    def second_thread() -> None:
        try:
            with Operator(domain, Tag("fc2", ""), 0, False, ""):
                pass
        except RuntimeError as error:
            errors.append(str(error))

    def run_it() -> None:
        thread = threading.Thread(target=second_thread)
        thread.start()
        thread.join()

    with Operator(domain, Tag("fc1", ""), 0, False, ""):
        run_it()
    assert len(errors) == 1 and "fc2: another thread" in errors[0] and "one order" in errors[0]
    run_it()
    assert len(errors) == 1, "the first one has ended"


@pytest.mark.parametrize("looks", [0, 1], ids=["before", "after"])
def test_a_wait_that_gave_up_is_raised_before_an_operator_and_after_it(looks: int) -> None:
    """After it, too: the next call of this rank may never come."""
    domain, bodies = Mock(in_use=threading.Lock()), []
    domain.fault.check.side_effect = [None] * looks + [OverlapTimeoutError("fc1: rank 0 waited")]
    with pytest.raises(OverlapTimeoutError, match="fc1"), Operator(domain, Tag("fc1", ""), 1, False, ""):
        bodies.append("ran")
    assert len(bodies) == looks and not domain.in_use.locked()


@pytest.mark.parametrize("joins", [1, 2], ids=["alone", "and the next one sends already"])
def test_pushes_are_joined_and_slots_are_unknown_after_a_body_that_raised(joins: int) -> None:
    """A second join ends what was sent ahead."""
    domain = Mock(in_use=threading.Lock())
    domain.workspace.use.is_ahead = joins == 2
    with Operator(domain, Tag("fc1", ""), 1, True, ""):
        pass
    domain.workspace.use.invalidate.assert_not_called()
    domain.engine.join.reset_mock()
    with pytest.raises(MemoryError), Operator(domain, Tag("fc1", ""), 1, True, ""):
        raise MemoryError
    assert domain.engine.join.call_count == joins
    domain.workspace.use.invalidate.assert_called_once_with()
    assert not domain.in_use.locked()


def test_a_profile_shows_an_operator_each_time_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that raises, too; and there is no range where nobody profiles."""
    domain, ranges = Mock(in_use=threading.Lock()), []

    def started(name: str) -> Mock:
        ranges.append(Mock(__enter__=Mock(), __exit__=Mock(), told=name))
        return ranges[-1]

    monkeypatch.setattr(bracket, "profiled", started)
    kept = Operator(domain, Tag("fc1", ""), 1, False, "fc1/fprop")
    for on in (False, True, False, True):
        monkeypatch.setattr(bracket, "is_profiling", lambda on=on: on)
        with contextlib.suppress(MemoryError), kept:
            assert sum(one.__exit__.call_count == 0 for one in ranges) == on
            raise MemoryError
    assert [one.told for one in ranges] == ["fc1/fprop"] * 2
    assert all(one.__enter__.call_count == one.__exit__.call_count == 1 for one in ranges)
