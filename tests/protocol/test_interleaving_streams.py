"""The GPU's copy engine on simulated streams: what the host only enqueues has to be ordered by streams alone."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("greenlet")

from tests.protocol.actors import Deadlock
from tests.protocol.explore import assert_caught, assert_passes
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import Before, gathers, scatters
from tests.protocol.faults import SLOT_REUSED_EARLY, Fault
from tests.protocol.simulated_ranks import SimulatedDomain
from tests.protocol.simulated_streams import StreamSimulation
from tests.protocol.test_interleaving_linear import mlp

PROBLEMS = {"gather": gathers, "scatter": scatters}
COPY = "failed = failed or copy(route.place, start + route.offset, route.nbytes, stream)"
SIGNAL = "failed = failed or copy(route.signal_at, route.epoch_at, 8, stream)"
WAIT = "wait_value(stream, route.counter_at, route.goal, AT_LEAST) if route.counter_at else 0"
KERNEL = "        kernel()  # first"
FORK = "self._driver.wait_event(self._handle, self._forked, 0) or failed"
JOIN = "self._driver.wait_event(self._driver.current_stream(), self._joined, 0) or failed"
NEXT_EPOCH = 'before a call whose blocks are sent by copies."""\n    word = next_word(tl.load(epoch_ptr), tag)'
FORKED_PUSH = "routes: list[Route]) -> None:\n        self._fork()\n        self._enqueue"


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize("operator", PROBLEMS)
def test_operators_pass(operator: str, one_queue: bool) -> None:
    assert_passes(PROBLEMS[operator]("chunked", StreamSimulation(3, one_queue=one_queue)), range(9))
    for method in ("fused", "direct"):
        assert_passes(PROBLEMS[operator](method, StreamSimulation(2, one_queue=one_queue)), range(3))


@pytest.mark.parametrize("one_queue", [False, True])
def test_forward_and_backward_pass(one_queue: bool) -> None:
    assert_passes(mlp("chunked", StreamSimulation(2, one_queue=one_queue), steps=3), range(8))
    assert_passes(mlp("fused", StreamSimulation(2, one_queue=one_queue)), range(3), resident=1)


BOTH_CHUNKED = ["gather chunked", "scatter chunked"]
ALL = [*BOTH_CHUNKED, "gather fused", "scatter fused"]
FAULTS = [
    ("flag before data", Fault("group.copy_engine", COPY, f"{SIGNAL}; {COPY}"), ["gather chunked", "scatter fused"]),
    ("dropped signal", Fault("group.copy_engine", SIGNAL, "pass", "deadlock"), ["gather chunked", "scatter fused"]),
    ("fork without wait", Fault("group.copy_engine", FORK, "failed", "deadlock|wrong"), ALL),
    (
        "fork without record",
        Fault("group.copy_engine", "record_event(self._forked", "current_stream(), (self._forked", "deadlock|wrong"),
        BOTH_CHUNKED,
    ),
    ("join without wait", Fault("group.copy_engine", JOIN, "failed"), ALL),
    (
        "join without record",
        Fault(
            "group.copy_engine",
            "failed = self._driver.record_event(self._joined",
            "failed = self._driver.current_stream(), (self._joined",
        ),
        BOTH_CHUNKED,
    ),
    (
        "push without fork",
        Fault("group.copy_engine", FORKED_PUSH, FORKED_PUSH.replace("self._fork()", "pass"), "deadlock|wrong"),
        BOTH_CHUNKED,
    ),
    (
        "kernel's pushes without fork",
        Fault("group.copy_engine", "        self._fork()\n        # No host", "        # No host", "deadlock|wrong"),
        ["scatter fused"],
    ),
    ("push without its counter", Fault("group.copy_engine", WAIT, "0"), ["scatter fused"]),
    (
        "no epoch increment",
        Fault("kernels.signal", NEXT_EPOCH, f"{NEXT_EPOCH} - (1 << 32)", "wrong|deadlock"),
        BOTH_CHUNKED,
    ),
    ("slot reused early", SLOT_REUSED_EARLY, BOTH_CHUNKED),
]


@pytest.mark.parametrize(
    ("fault", "problem"),
    [pytest.param(fault, problem, id=f"{name}-{problem}") for name, fault, problems in FAULTS for problem in problems],
)
def test_fault_is_caught(fault: Fault, problem: str) -> None:
    operator, method = problem.split()
    with fault.planted():
        error = assert_caught(PROBLEMS[operator](method, StreamSimulation(2)), range(24))
    assert re.search(fault.report, str(error)), error


def test_pushes_enqueued_before_their_kernel_deadlock_with_one_hardware_queue() -> None:
    """Rule 4 under CUDA_DEVICE_MAX_CONNECTIONS=1; with a queue for each stream nobody would notice."""
    fault = Fault(
        "group.copy_engine", KERNEL, f"        self._enqueue(source, routes)\n        return kernel()\n{KERNEL}"
    )
    with fault.planted():
        assert_passes(scatters("fused", StreamSimulation(2)), range(4))
        error = assert_caught(scatters("fused", StreamSimulation(2, one_queue=True)), range(4))
    assert isinstance(error, Deadlock)
    assert re.search(r"rank[01]\.slot0\.complete\[\d+\] to reach 1", str(error))


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
