"""Calls that use one slot again and again, as a replayed graph does: right between barriers, and wrong without them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("greenlet")

from tests.protocol.explore import Build, assert_caught, assert_passes
from tests.protocol.operator_problems import gathers, scatters, tag_of
from tests.protocol.simulated_ranks import SimulatedDomain, Simulation, core
from tests.protocol.simulated_streams import StreamSimulation

PROBLEMS: dict[str, Callable[..., Build]] = {"gather": gathers, "scatter": scatters}
MACHINES: dict[str, Callable[[], Simulation]] = {
    "host": lambda: Simulation(2),
    "three ranks": lambda: Simulation(3, device_waits=True),
    "streams": lambda: StreamSimulation(2),
}


def replays(domain: SimulatedDomain) -> None:
    """A replay of a graph of one call, which uses the first slot each time."""
    core("group.registry").barrier(domain, tag_of("begin"))


def forgetful(domain: SimulatedDomain) -> None:
    """The same without a barrier."""
    domain.workspace.use.clear()


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("operator", PROBLEMS)
def test_calls_behind_barriers_may_use_one_slot_again_and_again(operator: str, machine: str) -> None:
    assert_passes(PROBLEMS[operator]("chunked", MACHINES[machine](), before=replays), range(12))


@pytest.mark.parametrize("operator", PROBLEMS)
def test_without_barriers_they_may_not(operator: str) -> None:
    assert_caught(PROBLEMS[operator]("chunked", Simulation(3, device_waits=True), before=forgetful), range(60))
