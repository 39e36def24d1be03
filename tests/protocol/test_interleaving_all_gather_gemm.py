"""AllGather + GEMM: the real operator, kernel and pushes under seeded schedules."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("greenlet")

from tests.protocol.explore import assert_caught, assert_passes
from tests.protocol.operator_problems import gathers
from tests.protocol.simulated_ranks import Simulation


def test_fused_passes() -> None:
    assert_passes(gathers("fused", Simulation(2)), range(21))
    assert_passes(gathers("fused", Simulation(3)), range(9))


def test_fused_passes_with_one_resident_cta_of_three() -> None:
    assert_passes(gathers("fused", Simulation(2, ctas=3)), range(9), resident=1)


def test_direct_passes() -> None:
    assert_passes(gathers("direct", Simulation(2)), range(21))
    assert_passes(gathers("direct", Simulation(3)), range(9))
    assert_passes(gathers("direct", Simulation(2, ctas=3)), range(9), resident=1)


@pytest.mark.parametrize("method", ["chunked", "fused", "direct"])
def test_what_is_gathered_can_be_multiplied_twice(method: str) -> None:
    """The tile counter of a persistent kernel is used up after the first product."""
    assert_passes(gathers(method, Simulation(2), again=True), range(8))


@pytest.mark.parametrize("device_waits", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_chunked_passes(world: int, device_waits: bool) -> None:
    assert_passes(gathers("chunked", Simulation(world, device_waits=device_waits)), range(24))


@pytest.mark.parametrize(("method", "device_waits"), [("fused", False), ("chunked", True), ("chunked", False)])
def test_stopped_peer_is_named(method: str, device_waits: bool) -> None:
    """Rank 1 computes, but sends nothing: rank 0 reports it by name once its spin limit is reached. Of the two CTAs of a kernel,
    which wait for a chunk each, either may be the first."""
    timeout_s = 1e-7 if device_waits else 0.01  # 100 polls: that kernel takes its limit in nanoseconds
    machine = Simulation(2, timeout_s=timeout_s, device_waits=device_waits, stopped=(1,))
    error = assert_caught(gathers(method, machine, calls=1), range(1), spin=True)
    report = r"gather: rank 0 waited .* s for chunk [01] of rank 1: expected epoch 1, seen 0"
    assert re.search(report, str(error)), error
