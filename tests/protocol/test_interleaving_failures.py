"""Operators that do not end as they should: one that raises behind its push, and a barrier that gives up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("greenlet")

from overlap_train import OverlapTimeoutError
from tests.protocol.explore import Build, assert_passes
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import gathers, tag_of
from tests.protocol.simulated_ranks import TILE, SimulatedDomain, Simulation


def raises_behind_its_push(domain: SimulatedDomain, method: str = "chunked") -> None:
    """What an allocation that fails does, on every rank alike."""
    own = torch.full((TILE, TILE), torch.nan)
    with contextlib.suppress(MemoryError), domain.operator(tag_of("broken"), slots=1):
        plan = domain.plan(method, own, own).fprop
        plan.start(domain, tag_of("broken"), own)
        raise MemoryError


def raises_before_its_kernel(domain: SimulatedDomain) -> None:
    raises_behind_its_push(domain, "direct")


@pytest.mark.parametrize("before", [raises_behind_its_push, raises_before_its_kernel])
@pytest.mark.parametrize("device_waits", [False, True])
def test_the_operator_behind_one_that_raised_waits_for_all_ranks(
    before: Callable[[SimulatedDomain], None], device_waits: bool
) -> None:
    assert_passes(gathers("chunked", Simulation(3, device_waits=device_waits), before=before), range(12))
    assert_passes(gathers("direct", Simulation(2, device_waits=device_waits), before=before, complete=True), range(6))


def late_meeting(late: int = 1) -> Build:
    """Two ranks meet and gather ones, but rank `late` comes when the other has given up waiting for it."""

    def build(scheduler: Scheduler) -> Callable[[], None]:
        gave_up: list[int] = []
        gathered: dict[int, torch.Tensor] = {}

        def host(domain: SimulatedDomain) -> None:
            if domain.rank == late:
                scheduler.wait_until(lambda: bool(gave_up), "the other to give up")
            domain.workspace.barrier(tag_of("fc1"))
            gave_up.append(domain.rank)
            ones = torch.ones(TILE, TILE)
            plan = domain.plan("chunked", ones, ones).fprop
            gathered[domain.rank] = plan.start(domain, tag_of("fc1"), ones).gathered_view()
            if domain.rank != late:
                with pytest.raises(OverlapTimeoutError, match=f"fc1: rank {domain.rank} waited"):
                    domain.fault.check()

        # wait_kernel counts nanoseconds, of which a simulated one is a poll
        Simulation(2, device_waits=True, timeout_s=100e-9).spawn_hosts(scheduler, host)

        def check() -> None:
            assert gathered[1 - late].isnan().any(), "nothing shows that the ranks have not met"

        return check

    return build


def test_a_barrier_that_gives_up_is_named_and_poisons_what_comes_after_it() -> None:
    assert_passes(late_meeting(), range(20), spin=True)
