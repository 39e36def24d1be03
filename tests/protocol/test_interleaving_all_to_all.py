"""GEMM + A2A and A2A + GEMM: the real operators, kernels and pushes under seeded schedules."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

pytest.importorskip("greenlet")

from tests.protocol.explore import Build, assert_caught, assert_passes
from tests.protocol.operator_problems import to_heads, to_rows
from tests.protocol.simulated_ranks import TILE, Simulation

EXCHANGES = [to_heads, to_rows]

Problem = Callable[..., Build]


@pytest.mark.parametrize("method", ["fused", "direct"])
@pytest.mark.parametrize("problem", EXCHANGES)
def test_kernels_pass(problem: Problem, method: str) -> None:
    assert_passes(problem(method, Simulation(2)), range(6))
    assert_passes(problem(method, Simulation(3)), range(3))
    assert_passes(problem(method, Simulation(2, ctas=3), columns=2 * TILE), range(3), resident=1)


@pytest.mark.parametrize("device_waits", [False, True])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("problem", EXCHANGES)
def test_chunked_passes(problem: Problem, world: int, device_waits: bool) -> None:
    assert_passes(problem("chunked", Simulation(world, device_waits=device_waits)), range(12))


@pytest.mark.parametrize("method", ["chunked", "fused", "direct"])
def test_blocks_are_added_in_the_order_of_the_schedule(method: str) -> None:
    assert_passes(to_rows(method, Simulation(3), ordered=True), range(2))


@pytest.mark.parametrize("method", ["fused", "chunked"])
@pytest.mark.parametrize("problem", EXCHANGES)
def test_stopped_peer_is_named(problem: Problem, method: str) -> None:
    """Rank 1 computes, but sends nothing: rank 0 reports it by name, from inside the kernel or after it."""
    machine = Simulation(2, timeout_s=0.01, stopped=(1,))
    error = assert_caught(problem(method, machine, calls=1), range(1), spin=True)
    report = rf"{problem.__name__}: rank 0 waited .* s for chunk 0 of rank 1: expected epoch 1, seen 0"
    assert re.search(report, str(error)), error
