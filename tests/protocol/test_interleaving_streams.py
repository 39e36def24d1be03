"""The GPU's copy engine on simulated streams: what the host only enqueues has to be ordered by streams alone."""

from __future__ import annotations

import pytest

pytest.importorskip("greenlet")

from tests.protocol.explore import assert_caught, assert_passes
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import Before, gathers, scatters
from tests.protocol.simulated_ranks import SimulatedDomain
from tests.protocol.simulated_streams import StreamSimulation
from tests.protocol.test_interleaving_linear import mlp

PROBLEMS = {"gather": gathers, "scatter": scatters}


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize("operator", PROBLEMS)
def test_operators_pass(operator: str, one_queue: bool) -> None:
    assert_passes(PROBLEMS[operator]("chunked", StreamSimulation(3, one_queue=one_queue)), range(4))
    for method in ("fused", "direct"):
        assert_passes(PROBLEMS[operator](method, StreamSimulation(2, one_queue=one_queue)), range(3))


@pytest.mark.parametrize("one_queue", [False, True])
def test_forward_and_backward_pass(one_queue: bool) -> None:
    assert_passes(mlp("chunked", StreamSimulation(2, one_queue=one_queue)), range(4))
    assert_passes(mlp("fused", StreamSimulation(2, one_queue=one_queue), steps=1), range(2), resident=1)


def in_turns(machine: StreamSimulation) -> Before:
    """After its first call the caller goes on in its other stream, then in the first again, without ordering the two."""

    def before(domain: SimulatedDomain) -> None:
        gpu, side = machine.gpus[domain.rank], domain.engine.stream
        if len(gpu.streams) == 2:
            gpu.new_stream()
            return
        gpu.current = next(one for one in gpu.streams if one not in (gpu.current, side))

    return before


@pytest.mark.parametrize("method", ["chunked", "direct"])
def test_a_caller_may_use_two_streams(method: str) -> None:
    """An operator waits for the one before, wherever that ran."""
    machine = StreamSimulation(2)
    assert_passes(gathers(method, machine, before=in_turns(machine)), range(6))


def test_a_host_that_reads_device_memory_is_found() -> None:
    """The model itself: an asynchronous host must not see values."""

    def build(scheduler: Scheduler):
        StreamSimulation(2).spawn_hosts(scheduler, lambda domain: domain.heap.view(0)[0].item())
        return lambda: None

    assert "the host reads device memory" in str(assert_caught(build, range(1)))
