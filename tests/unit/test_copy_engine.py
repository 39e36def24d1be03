"""One push, the thread that plays the copy engine, and where a route takes its rows from."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest
import torch

from overlap_train.group.copy_engine import HostCopyEngine, Push, Route, StreamCopyEngine, run_push

EPOCH = torch.tensor([7])


def push(goal: int | None = None, count: int = 0) -> Push:
    """Of ones; after `goal` tiles, of which `count` are stored."""
    after = None if goal is None else (torch.tensor([count]), goal)
    return Push(torch.ones(4), torch.zeros(4), torch.zeros(1, dtype=torch.int64), EPOCH, after)


@pytest.mark.parametrize("one", [push(), push(goal=2, count=2), push(goal=2, count=3)])
def test_rows_that_are_complete_are_sent_and_signalled(one: Push) -> None:
    run_push(one, lambda seconds: None, timeout_s=0.01)
    assert one.target.tolist() == [1.0] * 4 and one.signal == EPOCH


def test_rows_that_never_get_complete_are_not_sent() -> None:
    """Nor signalled: the peer would take them for the kernel's."""
    one = push(goal=2, count=1)
    run_push(one, lambda seconds: None, timeout_s=0.01)
    assert not one.target.any() and not one.signal.any()


def test_a_route_takes_its_part_of_the_source() -> None:
    target, signal = torch.zeros(2, 3), torch.zeros(1, dtype=torch.int64)
    route, source = Route(6, target, signal, EPOCH, None), torch.arange(24.0).view(4, 6)
    assert route.push(source).source.tolist() == [[6.0, 7.0, 8.0], [9.0, 10.0, 11.0]]
    assert (route.offset, route.nbytes, route.place) == (24, 24, target.data_ptr())
    assert (route.signal_at, route.epoch_at, route.counter_at) == (signal.data_ptr(), EPOCH.data_ptr(), 0)
    apart = torch.arange(48.0).view(4, 12)[:, 3:9]  # a part of each row: in memory 12 elements from one to the next
    second = Route(12, target, signal, EPOCH, None).push(apart)
    assert second.source.tolist() == [[15.0, 16.0, 17.0], [18.0, 19.0, 20.0]]
    counter = torch.zeros(1, dtype=torch.int64)
    waiting = Route(0, target, signal, EPOCH, (counter, 5))
    assert (waiting.counter_at, waiting.goal) == (counter.data_ptr(), 5)


def test_what_the_thread_raised_is_raised_to_its_owner_after_all_pushes() -> None:
    engine = HostCopyEngine(timeout_s=1.0)
    good, source = Route(0, torch.zeros(4), torch.zeros(1, dtype=torch.int64), EPOCH, None), torch.ones(4)
    bad = Route(0, torch.zeros(4), torch.zeros(2, dtype=torch.int64)[:0], EPOCH.repeat(2), None)
    engine.push(source, [bad, good])
    with pytest.raises(RuntimeError):
        engine.join()
    assert good.target.tolist() == [1.0] * 4 and good.signal == EPOCH
    engine.close()


def test_a_join_of_the_thread_does_not_wait_for_what_was_sent_ahead() -> None:
    """What was sent ahead waits for a counter; the next join waits for it."""
    engine, counter, source = HostCopyEngine(timeout_s=10.0), torch.zeros(1, dtype=torch.int64), torch.ones(4)
    first, ahead = (
        Route(0, torch.zeros(4), torch.zeros(1, dtype=torch.int64), EPOCH, after) for after in (None, (counter, 1))
    )
    engine.push(source, [first])
    engine.begin_ahead()
    engine.push(source, [ahead])
    engine.join()
    assert first.signal == EPOCH and ahead.signal == 0
    threading.Timer(0.1, lambda: counter.fill_(1)).start()
    engine.join()
    assert ahead.signal == EPOCH
    engine.close()


def raise_if_refused(status: int) -> None:
    if status:
        raise RuntimeError(status)


@pytest.mark.parametrize("refused", ["wait_value", "copy"])
def test_what_the_driver_refuses_is_not_signalled(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """A peer would read what never came. Later pushes are not sent either: this rank raises."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Mock(cuda_stream="copies"))
    driver = Mock()
    for name in ("record_event", "wait_event", "wait_value", "copy"):
        getattr(driver, name).return_value = 0
    driver.check.side_effect = raise_if_refused
    getattr(driver, refused).return_value = 700
    target, signal = torch.zeros(4), torch.zeros(1, dtype=torch.int64)
    route = Route(0, target, signal, EPOCH, (torch.zeros(1, dtype=torch.int64), 1))
    with pytest.raises(RuntimeError):
        StreamCopyEngine(torch.device("cpu"), driver).push(torch.ones(4), [route, route])
    places = [where.args[0] for where in driver.copy.mock_calls]
    assert places == ([target.data_ptr()] if refused == "copy" else [])


def test_what_is_kept_is_copied_by_the_thread_behind_the_pushes() -> None:
    engine, counter, source = HostCopyEngine(timeout_s=10.0), torch.zeros(1, dtype=torch.int64), torch.ones(4)
    route = Route(0, torch.zeros(4), torch.zeros(1, dtype=torch.int64), EPOCH, (counter, 1))
    engine.push(source, [route])
    engine.keep(source, target := torch.zeros(4))
    assert not target.any()
    threading.Timer(0.1, lambda: counter.fill_(1)).start()
    engine.wait_kept()
    assert route.signal == EPOCH and target.tolist() == [1.0] * 4
    engine.close()
