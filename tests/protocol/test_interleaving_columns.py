"""Backwards of two column linears in a row: two calls an operator, twice, for which three slots are too few without a barrier."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("greenlet")

from tests.protocol.explore import Build, assert_caught, assert_passes
from tests.protocol.faults import Fault
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import integers
from tests.protocol.simulated_ranks import TILE, SimulatedDomain, Simulation, core
from tests.protocol.test_interleaving_linear import Context, plan_of


def columns(method: str, machine: Simulation, count: int = 3) -> Build:
    """dx [TILE, TILE] and dw of `count` column linears, each of its own x, w and dy, one after the other."""
    world = machine.world_size
    x, w = integers(count, world, TILE, TILE, seed=11), integers(count, world, TILE, TILE, seed=12)
    dy = integers(count, world, world * TILE, TILE, seed=13)

    def build(scheduler: Scheduler) -> Callable[[], None]:
        results: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

        def host(domain: SimulatedDomain) -> None:
            plan, rank = plan_of(domain, method, "regather"), domain.rank
            for number in range(count):
                context = Context(wants_dx=True)
                context.plan, context.kept, context.saved_tensors = plan, False, (x[number, rank], w[number, rank])
                dx, dw, _ = core("linear")._AllGatherLinear.backward(context, dy[number, rank])
                results[number, rank] = dx.clone(), dw

        machine.spawn_hosts(scheduler, host)

        def check() -> None:
            assert len(results) == count * world
            for (number, rank), (dx, dw) in results.items():
                everywhere = sum(part @ own for part, own in zip(dy[number], w[number], strict=True))
                assert torch.equal(dx, everywhere.chunk(world)[rank]), f"dx of linear {number}, rank {rank}"
                assert torch.equal(dw, dy[number, rank].t() @ x[number].flatten(0, 1)), f"dw of {number}, rank {rank}"

        return check

    return build


@pytest.mark.parametrize(("method", "ranks"), [("chunked", 3), ("fused", 2), ("direct", 2)])
def test_they_wait_for_each_other(method: str, ranks: int) -> None:
    assert_passes(columns(method, Simulation(ranks)), range(8))


BARRIER = 'self.barrier("slots/barrier")'


@pytest.mark.parametrize("fault", [Fault("workspace", BARRIER, "self.turns.clear()")], ids=["no barrier"])
def test_without_a_barrier_a_slot_is_written_that_is_still_read(fault: Fault) -> None:
    problem = columns("chunked", Simulation(3))
    with fault.planted():
        assert "wrong result" in str(assert_caught(problem, range(60)))
