"""What the copy engine of CPU processes across nodes does with a send that fails: every call raises from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

from overlap_train import OverlapTimeoutError
from overlap_train.group.signals import FaultRecord
from overlap_train.nodes.gloo import GlooTransport
from overlap_train.nodes.host_engine import NodeEngine

Started = tuple[NodeEngine, FaultRecord]


@pytest.fixture
def started() -> Iterator[Started]:
    fault = FaultRecord(torch.device("cpu"), 0, 60.0)
    engine = NodeEngine(60.0, mock.Mock(spec=GlooTransport), fault)
    yield engine, fault
    engine.close()


def by_later(engine: NodeEngine, error: Exception) -> None:
    engine.later.run(mock.Mock(side_effect=error))


def under_way(engine: NodeEngine, error: Exception) -> None:
    engine.network.join.side_effect = error  # type: ignore[attr-defined]


@pytest.mark.parametrize("fails", [by_later, under_way])
def test_a_send_that_failed_is_raised_ever_after(started: Started, fails: Callable[..., None]) -> None:
    engine, fault = started
    fails(engine, OverlapTimeoutError("could not send to rank 1"))
    for step in (engine.join, fault.check, fault.check):
        with pytest.raises(OverlapTimeoutError, match="could not send to rank 1"):
            step()


def test_an_earlier_failure_is_what_is_raised(started: Started) -> None:
    engine, fault = started
    with pytest.raises(OverlapTimeoutError):
        fault.keep(OverlapTimeoutError("rank 0 waited"))
    engine.join()
    engine.network.join.assert_not_called()  # type: ignore[attr-defined]
    by_later(engine, OverlapTimeoutError("could not send"))
    with pytest.raises(OverlapTimeoutError, match="rank 0 waited"):
        engine.join()


def test_what_is_no_timeout_is_raised_as_it_is(started: Started) -> None:
    engine, fault = started
    by_later(engine, MemoryError("no room"))
    with pytest.raises(MemoryError, match="no room"):
        engine.join()
    fault.check()
