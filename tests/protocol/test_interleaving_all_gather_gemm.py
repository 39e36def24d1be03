"""AllGather + GEMM: the real operator, kernel and pushes under seeded schedules, right and with planted faults."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("greenlet")

from tests.protocol.actors import StepLimit
from tests.protocol.explore import assert_caught, assert_passes
from tests.protocol.faults import Fault, fused_faults, host_faults
from tests.protocol.operator_problems import gathers
from tests.protocol.simulated_ranks import Simulation

OPERATOR, KERNEL = "operators.all_gather_gemm", "kernels.all_gather_gemm"

FUSED_FAULTS = {
    **host_faults(),
    **fused_faults(KERNEL),
    "wrong chunk order": Fault(KERNEL, "gathered_ptr + source.", "gathered_ptr + ((source + 1) % WORLD)."),
}

CHUNKED_FAULTS = {
    **host_faults(),
    "no wait": Fault(OPERATOR, "self._call.wait(source)", "pass"),
}


def test_fused_passes() -> None:
    assert_passes(gathers("fused", Simulation(2)), range(45))
    assert_passes(gathers("fused", Simulation(3)), range(15))


def test_fused_passes_with_one_resident_cta_of_three() -> None:
    assert_passes(gathers("fused", Simulation(2, ctas=3)), range(15), resident=1)


@pytest.mark.parametrize("device_waits", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_chunked_passes(world: int, device_waits: bool) -> None:
    assert_passes(gathers("chunked", Simulation(world, device_waits=device_waits)), range(60))


@pytest.mark.parametrize("fault", FUSED_FAULTS)
def test_fault_of_fused_is_caught(fault: str) -> None:
    with FUSED_FAULTS[fault].planted():
        error = assert_caught(gathers("fused", Simulation(3 if "somebody" in fault else 2)), range(30))
    assert re.search(FUSED_FAULTS[fault].report, str(error)), error


@pytest.mark.parametrize("fault", CHUNKED_FAULTS)
@pytest.mark.parametrize("device_waits", [False, True])
def test_fault_of_chunked_is_caught(fault: str, device_waits: bool) -> None:
    with CHUNKED_FAULTS[fault].planted():
        error = assert_caught(gathers("chunked", Simulation(3, device_waits=device_waits)), range(100))
    assert re.search(CHUNKED_FAULTS[fault].report, str(error)), error


@pytest.mark.parametrize(("method", "device_waits"), [("fused", False), ("chunked", True), ("chunked", False)])
def test_stopped_peer_is_named(method: str, device_waits: bool) -> None:
    """Rank 1 computes, but sends nothing: rank 0 reports it by name once its spin limit is reached."""
    timeout_s = 1e-7 if device_waits else 0.01  # 100 polls: that kernel takes its limit in nanoseconds
    machine = Simulation(2, timeout_s=timeout_s, device_waits=device_waits, stopped=(1,))
    error = assert_caught(gathers(method, machine, calls=1), range(1), spin=True)
    report = r"gather: rank 0 waited .* s for chunk 0 of rank 1: expected epoch 1, seen 0"
    assert re.search(report, str(error)), error


def test_unbounded_wait_is_caught() -> None:
    fault = Fault("kernels.signal", "(seen < epoch) & (late == 0)", "(seen < epoch)", reload=(KERNEL,))
    machine = Simulation(2, timeout_s=0.01, stopped=(1,))
    with fault.planted():
        error = assert_caught(gathers("fused", machine, calls=1), range(1), spin=True, step_limit=5000)
    assert isinstance(error, StepLimit)
