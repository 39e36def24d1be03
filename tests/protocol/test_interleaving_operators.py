"""Each operator by each method: the real engine, kernel and pushes under seeded schedules, on CPU processes' threads and where
kernels wait. Three ranks of most of them: test_planted_faults.py."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

pytest.importorskip("greenlet")

from tests.protocol.explore import Build, assert_caught, assert_passes
from tests.protocol.operator_problems import announced, combines, dispatches, gathers, scatters, to_heads, to_rows
from tests.protocol.simulated_ranks import TILE, Simulation
from tests.protocol.simulated_streams import StreamSimulation

Problem = Callable[..., Build]
PROBLEMS = [gathers, scatters, to_heads, to_rows]
every_problem = pytest.mark.parametrize("problem", PROBLEMS)


@pytest.mark.parametrize("method", ["fused", "direct"])
@every_problem
def test_kernels_pass(problem: Problem, method: str) -> None:
    assert_passes(problem(method, Simulation(2)), range(6))
    assert_passes(problem(method, Simulation(2, ctas=3), columns=2 * TILE), range(3), resident=1)


@pytest.mark.parametrize(("world", "device_waits"), [(2, False), (2, True), (3, True)])
@every_problem
def test_chunked_passes(problem: Problem, world: int, device_waits: bool) -> None:
    assert_passes(problem("chunked", Simulation(world, device_waits=device_waits)), range(9))


@pytest.mark.parametrize(
    "machine", [Simulation(2), Simulation(3, device_waits=True), StreamSimulation(2, one_queue=True)]
)
@pytest.mark.parametrize("problem", [dispatches, combines])
def test_experts_pass(problem: Problem, machine: Simulation) -> None:
    assert_passes(problem("chunked", machine), range(9))


def test_what_is_announced_passes() -> None:
    for machine in (Simulation(3), StreamSimulation(3)):
        assert_passes(announced("chunked", machine, calls=6), range(6))


def test_fused_passes_where_a_chunk_has_fewer_tiles_than_its_block() -> None:
    assert_passes(scatters("fused", Simulation(2), rows=2 * TILE), range(6))


@pytest.mark.parametrize("device_waits", [False, True])
def test_a_split_reduction_passes(device_waits: bool) -> None:
    assert_passes(scatters("fused", Simulation(2, device_waits=device_waits), split_reduction=True), range(6))


@pytest.mark.parametrize(("method", "device_waits"), [("fused", False), ("chunked", True), ("chunked", False)])
@every_problem
def test_stopped_peer_is_named(problem: Problem, method: str, device_waits: bool) -> None:
    """Rank 1 computes, but sends nothing: rank 0 reports it by name once its spin limit is reached, from inside the kernel or
    after it. Of the two CTAs of a kernel, which wait for a chunk each, either may be the first."""
    timeout_s = 1e-7 if device_waits else 0.01  # 100 polls: that kernel takes its limit in nanoseconds
    machine = Simulation(2, timeout_s=timeout_s, device_waits=device_waits, stopped=(1,))
    error = assert_caught(problem(method, machine, calls=1), range(1), spin=True)
    report = rf"{problem.__name__.removesuffix('s') if problem in (gathers, scatters) else problem.__name__}: "
    assert re.search(report + "rank 0 waited .* s for chunk [01] of rank 1: expected epoch 1, seen 0", str(error)), (
        error
    )
