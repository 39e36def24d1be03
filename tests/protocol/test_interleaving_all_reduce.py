"""GEMM + AllReduce under seeded schedules: a scatter and the gather of its sums take slots that are free, in two operators or,
where sums leave chunk by chunk, in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("greenlet")

from tests.protocol import planted as hook
from tests.protocol.explore import Build, assert_caught, assert_passes
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import integers
from tests.protocol.planted import Plant
from tests.protocol.simulated_ranks import TILE, SimulatedDomain, Simulation, core
from tests.protocol.simulated_streams import StreamSimulation
from tests.protocol.test_interleaving_linear import Context

STEPS = 3


def mlp(method: str, machine: Simulation, rows: int | None = None) -> Build:
    """STEPS times forward and backward: x [M, TILE] -> h [M, TILE] = x @ w1.T -> y [M, TILE] = sum of h @ w2.T; gradient dy.
    rows: M; None: TILE of each rank."""
    world = machine.world_size
    m = world * TILE if rows is None else rows
    x, dy = integers(STEPS, m, TILE, seed=11), integers(STEPS, m, TILE, seed=12)
    w1, w2 = integers(world, TILE, TILE, seed=13), integers(world, TILE, TILE, seed=14)

    def build(scheduler: Scheduler) -> Callable[[], None]:
        results: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        reduce, kept = core("ops.gemm_rs").reduce_partials, list[torch.Tensor]()

        def reduce_and_keep(*arguments: Any) -> torch.Tensor:
            """A GPU's memory serves nobody else before its stream has come by."""
            kept.append(reduce(*arguments))
            return kept[-1]

        scheduler.patch(core("ops.gemm_rs"), "reduce_partials", reduce_and_keep)

        def host(domain: SimulatedDomain) -> None:
            rank, functions = domain.rank, core("all_reduce")
            specs = ("LINEAR_DGRAD_ALL_REDUCE", "LINEAR_ALL_REDUCE")
            first, second = (
                core("ops.planned").Planned(domain, domain.plan(method, x[0], w, spec, main_grad="off"))
                for w, spec in zip((w1[rank], w2[rank]), specs, strict=True)
            )
            for step in range(STEPS):
                column, row = Context(True), Context(True)
                h = functions._LinearDgradAllReduce.forward(
                    column, x[step].clone(), w1[rank], None, first.linear("fc1")
                )
                y = functions._LinearAllReduce.forward(row, h, w2[rank], None, second.linear("fc2"))
                results[step, rank] = {"y": y.clone()}
                dh, dw2, *_ = functions._LinearAllReduce.backward(row, dy[step].clone())
                dx, dw1, *_ = functions._LinearDgradAllReduce.backward(column, dh)
                results[step, rank] |= {"dx": dx.clone(), "dw1": dw1, "dw2": dw2}

        machine.spawn_hosts(scheduler, host)

        def check() -> None:
            assert len(results) == STEPS * world
            for (step, rank), got in results.items():
                h, dh = ([t @ w for w in many] for t, many in ((x[step], w1.transpose(1, 2)), (dy[step], w2)))
                right = {
                    "y": sum(part @ w.t() for part, w in zip(h, w2, strict=True)),
                    "dx": sum(part @ w for part, w in zip(dh, w1, strict=True)),
                    "dw1": dh[rank].t() @ x[step], "dw2": dy[step].t() @ h[rank],
                }  # fmt: skip
                wrong = [name for name, value in got.items() if not torch.equal(value, right[name])]
                assert not wrong, f"step {step}, rank {rank}: {wrong}"

        return check

    return build


@pytest.mark.parametrize("method", ["chunked", "fused", "direct", "low_latency"])
def test_it_passes(method: str) -> None:
    assert_passes(mlp(method, Simulation(2)), range(2))
    assert_passes(mlp(method, Simulation(3), TILE + 1), range(1))


@pytest.mark.parametrize(("method", "ranks"), [("chunked", 3), ("fused", 2)])
def test_it_passes_on_streams(method: str, ranks: int) -> None:
    assert_passes(mlp(method, StreamSimulation(ranks)), range(3))


FAULTS: dict[str, tuple[str, Plant, Simulation]] = {
    "sums leave before they are complete": ("chunked", hook.no_wait_for_events(of_caller=False), StreamSimulation(3)),
    "the result is read before the sums are there": ("chunked", hook.left_out("wait_kernel"), StreamSimulation(3)),
    "sums of the call before": ("chunked", hook.pushes(hook.with_the_last_epoch), Simulation(3)),
    "sums lie where partial sums do": ("chunked", hook.slots_overlap(2), Simulation(3)),
    "chunks of sums leave before they are counted": ("fused", hook.pushes(hook.without_waiting), Simulation(2)),
    "chunks of sums leave before they are counted, on streams": (
        "fused",
        hook.no_wait_for_tiles(),
        StreamSimulation(2),
    ),
    "chunks of sums are read before they are there": (
        "fused",
        hook.polls(lambda word: word + hook.EPOCH),
        Simulation(2),
    ),
    "chunks of sums lie where partial sums do": ("fused", hook.slots_overlap(2), Simulation(2)),
    "chunks of sums take the slot of what they are sums of": ("fused", hook.taken_at_once, Simulation(2)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str) -> None:
    method, plant, machine = FAULTS[fault]
    with plant():
        assert_caught(mlp(method, machine), range(30))
