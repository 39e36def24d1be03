"""GEMM + ReduceScatter: the real operator, kernel and pushes under seeded schedules, right and with planted faults."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("greenlet")

from tests.protocol.actors import Deadlock
from tests.protocol.explore import assert_caught, assert_passes
from tests.protocol.operator_problems import scatters
from tests.protocol.faults import Fault, fused_faults, host_faults, in_slot, storing_faults
from tests.protocol.simulated_ranks import TILE, Simulation

OPERATOR, KERNEL = "ops.gemm_rs", "kernels.gemm_reduce_scatter"

STORE = "                tl.store(staging_ptr"
ANNOUNCE = "notify_copy_engine(complete_ptr + signal_word(target, chunk))"
LAND = "                tl.store(remote_block_ptr + offsets, part, mask=mask)\n"
TELL = "notify_peer(complete_ptr + signal_word(target, chunk), per_chunk, signal_ptr, expected)"
CLAIM = 'tl.int64), sem="relaxed", scope="gpu")'
RELEASE = 'sem="release", scope="sys")\n\n\n@triton.jit\ndef notify_peer'
GOAL = "word + 1], tiles)"
OF_CHUNK = "tile.counted(rows // plan.chunks, cols)"
BARRIER = "tl.debug_barrier()\n    tl.atomic_add("
COUNTER = "word = leg.target * MAX_CHUNKS + leg.chunk"
DEADLOCK = "deadlock.*complete.* to reach"
FOREIGN = "foreign = per_chunk * CHUNKS * (WORLD - 1)"
BACKWARDS = "index = per_chunk * CHUNKS * WORLD - 1 - index"


def in_signal(old: str, new: str, report: str) -> Fault:
    return Fault("kernels.signal", old, new, report, (KERNEL,))


FUSED_FAULTS = {
    **host_faults(),
    **fused_faults(KERNEL),
    "announced before stored": Fault(KERNEL, STORE, f"                {ANNOUNCE}\n{STORE}"),
    "not announced": Fault(KERNEL, ANNOUNCE, "pass", DEADLOCK),
    "announced for another rank": Fault(KERNEL, ANNOUNCE, ANNOUNCE.replace("target", "rank"), DEADLOCK),
    "announced for another chunk": Fault(KERNEL, ANNOUNCE, ANNOUNCE.replace("chunk", "1 - chunk")),
    "announced without barrier": in_signal(BARRIER, BARRIER.replace("tl.debug_barrier()", "pass"), "without a CTA bar"),
    "announced relaxed": Fault("kernels.signal", RELEASE, RELEASE.replace("release", "relaxed"), "released", (KERNEL,)),
    "announced at GPU scope": Fault("kernels.signal", RELEASE, RELEASE.replace("sys", "gpu"), "released", (KERNEL,)),
    "push does not wait for its rows": Fault("group.copy_engine", "counter.item() >= goal", "counter.item() >= 0"),
    "push waits for all tiles but one": in_slot(GOAL, GOAL.replace("tiles", "tiles - 1")),
    "push waits for the tiles of a whole block": Fault(
        "ops.launch", OF_CHUNK, OF_CHUNK.replace(" // plan.chunks", ""), DEADLOCK
    ),
    "push waits for another chunk": in_slot(COUNTER, COUNTER.replace("leg.chunk", "0"), "wrong result|deadlock"),
    "push waits for another counter": in_slot(COUNTER, COUNTER.replace("leg.target", "self.rank"), DEADLOCK),
    "wrong chunk order": Fault(KERNEL, "received_ptr + source * block", "received_ptr + (source + 1) % WORLD * block"),
    "tiles claimed twice": Fault("kernels.signal", CLAIM, f"{CLAIM} // 2", "wrong result|deadlock", (KERNEL,)),
    "own rows first": Fault("kernels.order", "(rank + 1 + unit //", "(rank + unit //", "deadlock", (KERNEL,)),
}
DIRECT_FAULTS = {
    **storing_faults(KERNEL),
    "told before stored": Fault(KERNEL, LAND, f"                {TELL}\n{LAND}"),
    "not told": Fault(KERNEL, TELL, "pass", "deadlock"),
    "told for another chunk": Fault(KERNEL, "epoch_ptr.dtype) + chunk", "epoch_ptr.dtype) + 1 - chunk"),
    "told somebody else": Fault(KERNEL, "outgoing_at_ptr + target", "outgoing_at_ptr + rank", "deadlock"),
    "stored at somebody else": Fault(KERNEL, "memory_at_ptr + target", "memory_at_ptr + rank"),
    "stored in another block": Fault(KERNEL, "+ rank * block", "+ target * block"),
    "told after the first tile": Fault(KERNEL, "target, chunk), per_chunk, signal", "target, chunk), 1, signal"),
    "told an old epoch": Fault(KERNEL, "signal_ptr, expected)", "signal_ptr, expected - (1 << 32))", "deadlock"),
    "own rows first": Fault("kernels.order", FOREIGN, f"{FOREIGN}\n        {BACKWARDS}", "deadlock", (KERNEL,)),
    "tiles of one peer for another": Fault("kernels.order", "1 + index %", "2 + index %", "wrong|deadlock", (KERNEL,)),
}
TWO_TILES_A_CHUNK = (
    "told after the first tile",
    "count does not acquire",
    "count does not release",
    "push waits for all tiles but one",
    "tiles claimed twice",
)  # what these need to show
MORE_TILES_THAN_A_CHUNK = "push waits for the tiles of a whole block"  # a block of one chunk's tiles does not show it

CHUNKED_FAULTS = {
    **host_faults(),
    "no wait": Fault(OPERATOR, "    call.wait_for_all()\n", ""),
}
CHUNKED_ON_HOST_FAULTS = {
    "stale epoch": Fault(
        "group.waits",
        "has_arrived(word.item(), expected)",
        "has_arrived(word.item(), expected - (1 << 32))",
        "wrong|Mismatch",
    ),
    "wait for one peer only": Fault("group.waits", "range(first, first + count)", "range(first, first + 1)"),
}
CHUNKED_ON_DEVICE_FAULTS = {
    "stale epoch": Fault(
        "kernels.signal", "expected = tl.load(epoch_ptr)", "expected = tl.load(epoch_ptr) - (1 << 32)", "wrong|Mismatch"
    ),
    "wait for one peer only": Fault("kernels.signal", "range(first, first + count)", "range(first, first + 1)"),
}

# A fused scatter whose reduction is deferred has no wait in its kernel: those of chunked are behind it.
_IN_ITS_KERNEL = (
    "no wait",
    "wait for",
    "wait does",
    "stale",
    "first poll",
    "next poll",
    "wrong chunk",
    "own rows first",
)
DEFERRED_FAULTS = {
    **{name: fault for name, fault in FUSED_FAULTS.items() if not name.startswith(_IN_ITS_KERNEL)},
    "no wait": Fault(OPERATOR, "    call.wait_for_all()\n", ""),
    "own partial left out": Fault(OPERATOR, "total = own.to(torch.float32, copy=True)", "total = 0 * own.float()"),
    "reduced in the kernel, too": Fault(KERNEL, "if REDUCE and source", "if source"),
}

STATIC_TILE_MAP = (
    Fault(
        KERNEL,
        "    index = claim(counter_ptr).to(tl.int32)\n    while",
        "    index = tl.program_id(0)\n    while",
    ),
    Fault(KERNEL, "        index = claim(counter_ptr).to(tl.int32)", "        index += tl.num_programs(0)"),
)


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


def test_static_tile_map_deadlocks_two_ranks_with_fewer_resident_ctas_than_the_grid() -> None:
    """Rule 4: with all CTAs resident nothing is wrong; with one, both ranks wait for a tile whose CTA never starts."""
    with STATIC_TILE_MAP[0].planted(), STATIC_TILE_MAP[1].planted():
        assert_passes(scatters("fused", Simulation(2)), range(5))
        error = assert_caught(scatters("fused", Simulation(2)), range(5), resident=1)
    assert isinstance(error, Deadlock)
    blocked = [f"gemm_reduce_scatter_kernel@{rank}" in str(error).split("\nlatest steps")[0] for rank in range(2)]
    assert blocked == [True, True], error


@pytest.mark.parametrize("device_waits", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_chunked_passes(world: int, device_waits: bool) -> None:
    assert_passes(scatters("chunked", Simulation(world, device_waits=device_waits)), range(24))


@pytest.mark.parametrize("fault", FUSED_FAULTS)
def test_fault_of_fused_is_caught(fault: str) -> None:
    with FUSED_FAULTS[fault].planted():
        problem = scatters("fused", Simulation(3 if "somebody" in fault else 2), **size_for(fault))
        error = assert_caught(problem, range(30))
    assert re.search(FUSED_FAULTS[fault].report, str(error)), error


@pytest.mark.parametrize("fault", DEFERRED_FAULTS)
def test_fault_of_a_deferred_reduction_is_caught(fault: str) -> None:
    with DEFERRED_FAULTS[fault].planted():
        problem = scatters("fused", Simulation(2), split_reduction=True, **size_for(fault))
        error = assert_caught(problem, range(30))
    assert re.search(DEFERRED_FAULTS[fault].report, str(error)), error


@pytest.mark.parametrize("fault", DIRECT_FAULTS)
def test_fault_of_direct_is_caught(fault: str) -> None:
    with DIRECT_FAULTS[fault].planted():
        problem = scatters("direct", Simulation(3 if "somebody" in fault else 2), **size_for(fault))
        error = assert_caught(problem, range(30))
    assert re.search(DIRECT_FAULTS[fault].report, str(error)), error


@pytest.mark.parametrize(
    ("fault", "device_waits"),
    [
        ((CHUNKED_FAULTS | host_faults(on_device))[name], on_device)
        for name in CHUNKED_FAULTS
        for on_device in (False, True)
    ]
    + [(fault, False) for fault in CHUNKED_ON_HOST_FAULTS.values()]
    + [(fault, True) for fault in CHUNKED_ON_DEVICE_FAULTS.values()],
    ids=[f"{name}-{where}" for name in CHUNKED_FAULTS for where in ("host", "device")]
    + [f"{name}-host" for name in CHUNKED_ON_HOST_FAULTS]
    + [f"{name}-device" for name in CHUNKED_ON_DEVICE_FAULTS],
)
def test_fault_of_chunked_is_caught(fault: Fault, device_waits: bool) -> None:
    with fault.planted():
        error = assert_caught(scatters("chunked", Simulation(3, device_waits=device_waits)), range(100))
    assert re.search(fault.report, str(error)), error


def test_stopped_peer_is_named() -> None:
    """Rank 1 computes, but sends nothing: rank 0 reports it by name once its spin limit is reached."""
    machine = Simulation(2, timeout_s=0.01, stopped=(1,))
    error = assert_caught(scatters("fused", machine, calls=1), range(1), spin=True)
    report = r"scatter: rank 0 waited 0.01 s for chunk 0 of rank 1: expected epoch 1, seen 0"
    assert re.search(report, str(error)), error
