"""Backwards of column linears: two calls an operator, and for two of them in a row three slots are too few without a barrier."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("greenlet")

from overlap_train.select.method import Method
from tests.protocol.explore import Build, assert_passes
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import integers
from tests.protocol.simulated_ranks import TILE, SimulatedDomain, Simulation, core
from tests.protocol.test_interleaving_linear import Context, planned


def columns(
    method: str, machine: Simulation, count: int = 3, barrier_first: bool = False, barriers: list[str] | None = None
) -> Build:
    """dx [TILE, TILE] and dw of `count` column linears, each of its own x, w and dy, one after the other.

    barrier_first: ranks meet before each. barriers: gets the name of each barrier of each rank.
    """
    world = machine.world_size
    x, w = integers(count, world, TILE, TILE, seed=11), integers(count, world, TILE, TILE, seed=12)
    dy = integers(count, world, world * TILE, TILE, seed=13)

    def build(scheduler: Scheduler) -> Callable[[], None]:
        results: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

        def host(domain: SimulatedDomain) -> None:
            rank = domain.rank
            variant = Method(method, barrier_first=barrier_first)
            column, _ = planned(domain, method, x[0, rank], w[0, rank], w[0, rank], variant=variant)
            if barriers is not None:
                meet = domain.workspace.barrier
                domain.workspace.barrier = lambda tag: (barriers.append(tag.op), meet(tag))
            for number in range(count):
                context = Context(wants_dx=True)
                context.linear, context.weight, context.x_shape = column.linear("qkv"), w[number, rank], x.shape[2:]
                context.save_for_backward(x[number, rank], w[number, rank])
                dx, dw, *_ = core("linear")._AllGatherLinear.backward(context, dy[number, rank])
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


@pytest.mark.parametrize(("count", "barrier_first", "each"), [(1, False, 0), (1, True, 1), (3, False, 2), (3, True, 3)])
def test_ranks_meet_where_asked_and_where_slots_run_out(count: int, barrier_first: bool, each: int) -> None:
    barriers: list[str] = []
    assert_passes(columns("chunked", Simulation(2, device_waits=True), count, barrier_first, barriers), range(1))
    assert barriers == ["qkv/dgrad/barrier"] * 2 * each
