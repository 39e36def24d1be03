"""GEMM + ReduceScatter: the real operator, kernel and pushes under seeded schedules, right and with planted faults."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("greenlet")

from tests.protocol.explore import assert_caught, assert_passes
from tests.protocol.faults import Fault, fused_faults, host_faults
from tests.protocol.interleaving import Deadlock
from tests.protocol.operator_problems import scatters
from tests.protocol.simulated_ranks import Simulation

OPERATOR, KERNEL = "operators.gemm_reduce_scatter", "kernels.gemm_reduce_scatter"

STORE = "            tl.store(staging_ptr + target * block + rows * n + cols, acc.to(staging_ptr.dtype.element_ty), mask=mask)\n"
ANNOUNCE = "            announce(complete_ptr + target)\n"
CLAIM = 'tl.int64), sem="relaxed", scope="gpu")'
COUNT = 'tl.int64), sem="release", scope="sys")\n\n\n@triton.jit\ndef claim'

FUSED_FAULTS = {
    **host_faults(),
    **fused_faults(KERNEL),
    "announced before stored": Fault(KERNEL, STORE + ANNOUNCE, ANNOUNCE + STORE),
    "not announced": Fault(KERNEL, ANNOUNCE, "            pass\n", "deadlock.*counters.* to reach 2"),
    "announced to another": Fault(KERNEL, "complete_ptr + target", "complete_ptr + rank", "deadlock.*counters.* to reach 2"),
    "announced without barrier": Fault("kernels.signal", "    tl.debug_barrier()\n", "", "without a CTA barrier", (KERNEL,)),
    "announced relaxed": Fault("kernels.signal", COUNT, COUNT.replace("release", "relaxed"), "released at system scope", (KERNEL,)),
    "announced at GPU scope": Fault("kernels.signal", COUNT, COUNT.replace("sys", "gpu"), "released at system scope", (KERNEL,)),
    "push does not wait for its rows": Fault("copy_engine", "counter.item() >= goal", "counter.item() >= 0"),
    "push waits for all tiles but one": Fault(OPERATOR, "(complete[d : d + 1], tiles)", "(complete[d : d + 1], tiles - 1)"),
    "push waits for another counter": Fault(
        OPERATOR, "(complete[d : d + 1], tiles)", "(complete[call.rank : call.rank + 1], tiles)", "deadlock"
    ),
    "wrong chunk order": Fault(KERNEL, "received_ptr + source * block", "received_ptr + (source + 1) % WORLD * block"),
    "tiles claimed twice": Fault("kernels.signal", CLAIM, f"{CLAIM} // 2", "wrong result|deadlock", (KERNEL,)),
    "own rows first": Fault(KERNEL, "target = (rank + 1 + index // tiles)", "target = (rank + index // tiles)", "deadlock"),
}  # fmt: skip

CHUNKED_FAULTS = {
    **host_faults(),
    "no wait": Fault(OPERATOR, "            self._call.wait(source)\n", "            pass\n"),
}
CHUNKED_ON_HOST_FAULTS = {
    "no epoch increment on the host": Fault("workspace", "        self.expected += 1\n", ""),
    "stale epoch": Fault("workspace", "signal[source].item() >= expected", "signal[source].item() >= expected - 1"),
}
CHUNKED_ON_DEVICE_FAULTS = {
    "stale epoch": Fault("kernels.signal", "tl.load(epoch_ptr), abort_ptr", "tl.load(epoch_ptr) - 1, abort_ptr"),
}

STATIC_TILE_MAP = (
    Fault(KERNEL, "    epoch = tl.load(epoch_ptr)\n    index = claim(counter_ptr).to(tl.int32)",
          "    epoch = tl.load(epoch_ptr)\n    index = tl.program_id(0)"),
    Fault(KERNEL, "        index = claim(counter_ptr).to(tl.int32)", "        index += tl.num_programs(0)"),
)  # fmt: skip


@pytest.mark.parametrize(("world", "seeds"), [(2, 50), (3, 30)])
def test_fused_passes(world: int, seeds: int) -> None:
    assert_passes(scatters("fused", Simulation(world)), range(seeds))


def test_fused_passes_with_one_resident_cta_of_three() -> None:
    assert_passes(scatters("fused", Simulation(2, ctas=3)), range(15), resident=1)


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
    assert_passes(scatters("chunked", Simulation(world, device_waits=device_waits)), range(100))


@pytest.mark.parametrize("fault", FUSED_FAULTS)
def test_fault_of_fused_is_caught(fault: str) -> None:
    with FUSED_FAULTS[fault].planted():
        error = assert_caught(scatters("fused", Simulation(3 if "somebody" in fault else 2)), range(30))
    assert re.search(FUSED_FAULTS[fault].report, str(error)), error


@pytest.mark.parametrize(
    ("fault", "device_waits"),
    [(fault, on_device) for fault in CHUNKED_FAULTS.values() for on_device in (False, True)]
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
    report = r"scatter: rank 0 waited 0.01 s for the chunk of rank 1: expected epoch 1, seen 0"
    assert re.search(report, str(error)), error
