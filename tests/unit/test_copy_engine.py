"""Pushes that cannot be made: nothing is signalled for them."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from overlap_train.group.copy_engine import HostCopyEngine, Push, Route, StreamCopyEngine, run_push

EPOCH = torch.tensor([7])


def test_rows_that_never_get_complete_are_not_sent() -> None:
    """Nor signalled: the peer would take them for the kernel's."""
    one = Push(torch.ones(4), torch.zeros(4), torch.zeros(1, dtype=torch.int64), EPOCH, (torch.tensor([1]), 2))
    run_push(one, lambda seconds: None, timeout_s=0.01)
    assert not one.target.any() and not one.signal.any()


def test_what_the_thread_raised_is_raised_to_its_owner_after_all_pushes() -> None:
    engine = HostCopyEngine(timeout_s=1.0)
    good, source = Route(0, torch.zeros(4), torch.zeros(1, dtype=torch.int64), EPOCH, None), torch.ones(4)
    bad = Route(0, torch.zeros(4), torch.zeros(2, dtype=torch.int64)[:0], EPOCH.repeat(2), None)
    engine.push(source, [bad, good])
    with pytest.raises(RuntimeError):
        engine.join()
    assert good.target.tolist() == [1.0] * 4 and good.signal == EPOCH
    engine.close()


def raise_if_refused(status: int) -> None:
    if status:
        raise RuntimeError(status)


@pytest.mark.parametrize("refused", ["wait_value", "copy"])
def test_what_the_driver_refuses_is_not_signalled(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """A peer would read what never came. Later pushes are not sent either: this rank raises."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Mock(cuda_stream=7))
    driver = Mock()
    for name in ("record_event", "wait_event", "wait_value", "copy"):
        getattr(driver, name).return_value = 0
    driver.check.side_effect = raise_if_refused
    getattr(driver, refused).return_value = 700
    target, signal = torch.zeros(4), torch.zeros(1, dtype=torch.int64)
    route = Route(0, target, signal, EPOCH, (torch.zeros(1, dtype=torch.int64), 1))
    with pytest.raises(RuntimeError):
        StreamCopyEngine(torch.device("cpu"), driver).push(torch.ones(4), [route, route])
    places = [where.args[0].value for where in driver.copy.mock_calls]
    assert places == ([target.data_ptr()] if refused == "copy" else [])
