"""The exchanges of a result, after an error that came between two of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_train.nodes.crossings import ResultCrossings
from overlap_train.schedule.order import GEMM_A2A, SCATTER


class Engine:
    """What was enqueued; raises in `fails`."""

    lands = has_started = False

    def __init__(self, fails: int | None = None) -> None:
        self.enqueued: list[str] = []
        self._fails = fails

    def finish_started(self) -> bool:
        return False

    def at_end(self, crossings: Any) -> None:
        pass

    def cross(self, call: Any, crossing: Any, source: Any, make: Any, landing: Any) -> int:
        if crossing.number == self._fails:
            raise RuntimeError("out of memory")
        self.enqueued.append(f"+{crossing.number}")
        return crossing.number

    def arrive(self, call: Any, crossing: Any, exchange: int, landing: Any) -> None:
        assert exchange == crossing.number
        self.enqueued.append(f"-{exchange}")


def crossings_of(engine: Engine, kind: str, beside_wgrad: bool = False) -> ResultCrossings:
    call: Any = SimpleNamespace(rank=0, chunk_of=lambda rank, chunk: torch.zeros(1))
    numbered = tuple(SimpleNamespace(number=number, lands=False) for number in range(4))
    plan: Any = SimpleNamespace(crossings=numbered, kind=kind, beside_wgrad=beside_wgrad)
    return ResultCrossings(engine, call, plan)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [SCATTER, GEMM_A2A])
def test_what_was_sent_before_an_error_is_let_arrive_and_nothing_else_starts(kind: str) -> None:
    engine = Engine()
    crossings = crossings_of(engine, kind)
    for _ in range(2):
        crossings.send(torch.zeros(1))
    crossings.finish()  # as the bracket of an operator does, whatever was raised in it
    assert engine.enqueued == ["+0", "+1", "-0", "-1"]


def test_an_exchange_that_could_not_start_is_not_waited_for() -> None:
    engine = Engine(fails=1)
    crossings = crossings_of(engine, SCATTER)
    crossings.send(torch.zeros(1))
    with pytest.raises(RuntimeError, match="out of memory"):
        crossings.send(torch.zeros(1))
    crossings.finish()
    assert engine.enqueued == ["+0", "-0"]


def test_what_waits_for_a_weight_gradient_leaves_in_the_end() -> None:
    engine = Engine()
    crossings = crossings_of(engine, SCATTER, beside_wgrad=True)
    for _ in range(4):
        crossings.send(torch.zeros(1))
    assert engine.enqueued == ["+0", "+1"], "half of them"
    crossings.finish()
    assert engine.enqueued == ["+0", "+1", "+2", "+3", "-0", "-1", "-2", "-3"]
