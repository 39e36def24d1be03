"""GEMM + ReduceScatter: the real operator, kernel and pushes under seeded schedules, right and with planted faults."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("greenlet")

from tests.protocol.explore import assert_caught, assert_passes
from tests.protocol.operator_problems import scatters
from tests.protocol.simulated_ranks import TILE, Simulation

OPERATOR, KERNEL = "ops.gemm_rs", "kernels.gemm_reduce_scatter"

STORE = "                tl.store(staging_ptr"
TELL = "notify_peer(complete_ptr + signal_word(target, chunk), per_chunk, signal_ptr, expected)"
RELEASE = 'sem="release", scope="sys")\n\n\n@triton.jit\ndef notify_peer'
BARRIER = "tl.debug_barrier()\n    tl.atomic_add("
BACKWARDS = "index = per_chunk * CHUNKS * WORLD - 1 - index"


TWO_TILES_A_CHUNK = (
    "told after the first tile",
    "count does not acquire",
    "count does not release",
    "push waits for all tiles but one",
    "tiles claimed twice",
)  # what these need to show
MORE_TILES_THAN_A_CHUNK = "push waits for the tiles of a whole block"  # a block of one chunk's tiles does not show it


def size_for(fault: str) -> dict[str, int]:
    """The smallest output of a rank that shows a fault."""
    if fault == MORE_TILES_THAN_A_CHUNK:
        return {"rows": 2 * TILE}
    return {"columns": 2 * TILE if fault in TWO_TILES_A_CHUNK else TILE}


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
