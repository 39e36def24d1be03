"""GEMM + ReduceScatter: the real operator, kernel and pushes under seeded schedules."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("greenlet")

from tests.protocol.explore import assert_caught, assert_passes
from tests.protocol.operator_problems import scatters
from tests.protocol.simulated_ranks import TILE, Simulation


def test_fused_passes() -> None:
    assert_passes(scatters("fused", Simulation(2)), range(21))
    assert_passes(scatters("fused", Simulation(3)), range(9))


def test_fused_passes_where_a_chunk_has_fewer_tiles_than_its_block() -> None:
    assert_passes(scatters("fused", Simulation(2), rows=2 * TILE), range(10))


def test_direct_passes() -> None:
    assert_passes(scatters("direct", Simulation(2)), range(21))
    assert_passes(scatters("direct", Simulation(3)), range(9))
    assert_passes(scatters("direct", Simulation(2, ctas=3), columns=2 * TILE), range(9), resident=1)


@pytest.mark.parametrize("device_waits", [False, True])
def test_a_deferred_reduction_passes(device_waits: bool) -> None:
    assert_passes(scatters("fused", Simulation(2, device_waits=device_waits), split_reduction=True), range(12))
    assert_passes(scatters("fused", Simulation(3, device_waits=device_waits), split_reduction=True), range(6))


def test_fused_passes_with_one_resident_cta_of_three() -> None:
    assert_passes(scatters("fused", Simulation(2, ctas=3)), range(9), resident=1)


@pytest.mark.parametrize("device_waits", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_chunked_passes(world: int, device_waits: bool) -> None:
    assert_passes(scatters("chunked", Simulation(world, device_waits=device_waits)), range(24))


def test_stopped_peer_is_named() -> None:
    """Rank 1 computes, but sends nothing: rank 0 reports it by name once its spin limit is reached."""
    machine = Simulation(2, timeout_s=0.01, stopped=(1,))
    error = assert_caught(scatters("fused", machine, calls=1), range(1), spin=True)
    report = r"scatter: rank 0 waited 0.01 s for chunk 0 of rank 1: expected epoch 1, seen 0"
    assert re.search(report, str(error)), error
