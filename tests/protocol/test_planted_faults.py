"""Every rule of the protocol has a fault that breaks it (planted.py), and a program that must find it under some seed.

The same programs without a fault pass; test_interleaving_*.py runs them under more seeds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch

from tests.protocol import planted as hook
from tests.protocol.explore import Build, assert_caught, assert_passes
from tests.protocol.operator_problems import (
    all_reduces,
    announced,
    combines,
    dispatches,
    gathers,
    scatters,
    to_heads,
    to_rows,
)
from tests.protocol.planted import EPOCH, Plant
from tests.protocol.simulated_nodes import NodeSimulation
from tests.protocol.simulated_ranks import Simulation
from tests.protocol.simulated_streams import StreamSimulation

SEEDS = range(30)
PROCESSES, DEVICE, STREAMS = Simulation(3), Simulation(3, device_waits=True), StreamSimulation(3)


def programs() -> dict[str, Build]:
    """What runs: an operator by a method, several calls of each rank."""
    return {
        "AG+GEMM fused": gathers("fused", PROCESSES),
        "AG+GEMM fused, device": gathers("fused", DEVICE),
        "AG+GEMM direct": gathers("direct", PROCESSES),
        "AG+GEMM chunked": gathers("chunked", PROCESSES),
        "AG+GEMM chunked, streams": gathers("chunked", StreamSimulation(3)),
        "AG+GEMM announced": announced("chunked", PROCESSES),
        "AG+GEMM announced, streams": announced("chunked", StreamSimulation(3)),
        "AG+GEMM fused, streams": gathers("fused", StreamSimulation(3)),
        "GEMM+RS fused": scatters("fused", PROCESSES, columns=32),
        "GEMM+RS direct": scatters("direct", PROCESSES, columns=32),
        "GEMM+RS chunked": scatters("chunked", PROCESSES),
        "GEMM+RS chunked, streams": scatters("chunked", StreamSimulation(3)),
        "GEMM+RS fused, streams": scatters("fused", StreamSimulation(3), columns=32),
        "GEMM+RS split, device": scatters("fused", DEVICE, split_reduction=True),
        "GEMM+A2A fused": to_heads("fused", PROCESSES, columns=32),
        "GEMM+A2A direct": to_heads("direct", PROCESSES, columns=32),
        "A2A+GEMM fused": to_rows("fused", PROCESSES),
        "A2A+GEMM direct": to_rows("direct", PROCESSES),
        "AR in one shot": all_reduces("one shot", PROCESSES),
        "AR in two": all_reduces("two shots", PROCESSES),
        "dispatch": dispatches("chunked", PROCESSES),
        "combine": combines("chunked", PROCESSES),
        "dispatch, streams": dispatches("chunked", StreamSimulation(3)),
        "combine, streams": combines("chunked", StreamSimulation(3)),
        "AG+GEMM, NCCL": gathers("chunked", NodeSimulation(2)),
        "GEMM+RS, NCCL": scatters("chunked", NodeSimulation(2)),
        "AG+GEMM, NVSHMEM": gathers("chunked", NodeSimulation(2, puts=True)),
        "GEMM+RS, NVSHMEM": scatters("chunked", NodeSimulation(2, puts=True)),
    }


@dataclass(frozen=True)
class Fault:
    """plant: a context in which the simulated machine has the fault. report: a regular expression of what some seed reports."""

    name: str
    plant: Plant
    programs: tuple[str, ...]
    report: str = "wrong result"


def with_zeros(pieces: list) -> list:
    (data, into), word = pieces
    return [(torch.zeros_like(data), into), word]


WRONG, STOPS, ORDER, COUNTS = "wrong result", "deadlock", "at system scope", "acquires and is released"
TELL, COUNT = ("signals", "atomic"), (".complete", "atomic")  # what kernels do to words
GATHERS, SCATTERS = ("AG+GEMM fused", "A2A+GEMM fused"), ("GEMM+RS fused", "GEMM+A2A fused")
SHOTS = ("AR in one shot", "AR in two")
STORED = ("AG+GEMM direct", *SHOTS)
DIRECT = (*STORED, "GEMM+RS direct", "A2A+GEMM direct")
STREAM = ("AG+GEMM chunked, streams", "AG+GEMM fused, streams")
ANNOUNCED = ("AG+GEMM announced", "AG+GEMM announced, streams")
NCCL, NVSHMEM = ("AG+GEMM, NCCL", "GEMM+RS, NCCL"), ("AG+GEMM, NVSHMEM", "GEMM+RS, NVSHMEM")
EXPERTS, OF_EXPERTS = ("dispatch", "combine"), ("dispatch, streams", "combine, streams")
CHUNKED, COUNTED = ("AG+GEMM chunked", *EXPERTS), (*STREAM, *OF_EXPERTS)
BY_COPIES = ("AG+GEMM fused, streams", "GEMM+RS chunked, streams", *OF_EXPERTS)
ANY = "|".join((WRONG, STOPS, "Mismatch", "TimeoutError"))

FAULTS = [
    # who signals, when, what word: by copies of streams
    Fault("signal before its data", hook.signal_before_data, BY_COPIES),
    Fault("signal left out", hook.signals(lambda word: None), BY_COPIES, STOPS),
    Fault("signal of the epoch before", hook.signals(lambda word: word - EPOCH), BY_COPIES, f"{STOPS}|{WRONG}"),
    Fault("signal of another call", hook.signals(lambda word: word ^ 1), BY_COPIES, ANY),
    Fault("signal of the next chunk", hook.signals(lambda word: word, words=1), ("AG+GEMM fused, streams",), ANY),
    Fault("data left out", hook.data(lambda *copy: None), BY_COPIES),
    Fault("half of the data", hook.data(lambda to, at, nbytes: (to, at, nbytes // 2)), BY_COPIES),
    Fault("data beside their place", hook.data(lambda to, at, nbytes: (to + 16, at, nbytes)), BY_COPIES),
    Fault("data of another place", hook.data(lambda to, at, nbytes: (to, at + 16, nbytes)), BY_COPIES),
    # by the thread of a CPU process
    Fault("thread signals before its data", hook.pushes(hook.signal_first), (*GATHERS, *SCATTERS, *EXPERTS, "AG+GEMM chunked")),
    Fault("thread leaves the signal out", hook.pushes(hook.without_signal), (*GATHERS, *SCATTERS, *EXPERTS), STOPS),
    Fault("thread leaves the data out", hook.pushes(hook.without_data), (*GATHERS, *SCATTERS, *EXPERTS)),
    Fault("thread signals the epoch before", hook.pushes(hook.with_the_last_epoch), (*GATHERS, *EXPERTS), f"{STOPS}|{WRONG}"),
    Fault("thread signals another call", hook.pushes(hook.with_another_fingerprint), (*GATHERS, *EXPERTS), "Mismatch"),
    # by kernels that store at the peers
    Fault("kernel leaves the signal out", hook.accesses(*TELL, hook.masked), DIRECT, STOPS),
    Fault("kernel signals the epoch before", hook.accesses(*TELL, hook.value(lambda word: word - EPOCH)), DIRECT, ANY),
    Fault("kernel signals another call", hook.accesses(*TELL, hook.value(lambda word: word ^ 1)), DIRECT, "Mismatch"),
    Fault("kernel signals the next chunk", hook.accesses(*TELL, hook.moved(1)), STORED, ANY),
    Fault("kernel signals relaxed", hook.accesses(*TELL, hook.ordered("RELAXED")), DIRECT, "released"),
    Fault("kernel signals at GPU scope", hook.accesses(*TELL, hook.ordered(scope="GPU")), DIRECT, "released"),
    # who waits, for what
    Fault("wait relaxed", hook.polls(change=hook.ordered("RELAXED")), (*GATHERS, *STORED), ORDER),
    Fault("wait at GPU scope", hook.polls(change=hook.ordered(scope="GPU")), (*GATHERS, *STORED), ORDER),
    Fault("wait takes the epoch before", hook.polls(lambda word: word + EPOCH), (*GATHERS, *SHOTS), f"{WRONG}|Mismatch"),
    Fault("wait for the next chunk", hook.polls(change=hook.moved(1)), (*GATHERS, *SHOTS), ANY),
    Fault("wait for another rank", hook.polls(change=hook.moved(8)), (*GATHERS, *SHOTS), ANY),
    Fault("wait sees another call", hook.polls(lambda word: word ^ 1), (*GATHERS, *SHOTS), "Mismatch"),
    Fault("wait kernel left out", hook.left_out("wait_kernel"), (*BY_COPIES[1:], "AG+GEMM chunked, streams")),
    Fault("push does not wait for its tiles", hook.no_wait_for_tiles(), ("GEMM+RS fused, streams",)),
    Fault("push waits for one tile", hook.no_wait_for_tiles(1), ("GEMM+RS fused, streams",)),
    Fault("thread does not wait for tiles", hook.pushes(hook.without_waiting), SCATTERS),
    Fault("thread waits for one tile", hook.pushes(hook.waiting_for_one_tile), SCATTERS),
    Fault("copies do not wait for the caller", hook.no_wait_for_events(of_caller=False), ("GEMM+RS chunked, streams",), ANY),
    Fault("operator ends before its copies", hook.no_wait_for_events(of_caller=True), BY_COPIES),
    Fault("events are behind nothing", lambda: hook.events_too_early(), BY_COPIES, ANY),
    Fault("operator ends before its pushes", lambda: hook.no_join(), ("AG+GEMM fused", *CHUNKED)),
    # who reuses which slot
    Fault("two slots in one place", hook.slots_overlap(2), ("AG+GEMM fused", SHOTS[0], *CHUNKED, *COUNTED)),
    Fault("all slots in one place", hook.slots_overlap(3), ("AG+GEMM fused", SHOTS[0], *CHUNKED, *STREAM)),
    Fault("slot of what comes first taken again", lambda: hook.taken_at_once(), ANNOUNCED, ANY),
    Fault("two slots in one place, beside what comes first", hook.slots_overlap(2), ANNOUNCED, ANY),
    # epochs
    Fault("epoch not advanced by the host", hook.host_leaves_out("fill_", ".epoch"), ("AG+GEMM fused", *CHUNKED), ANY),
    Fault("epoch not advanced by its kernel", hook.left_out("next_epoch_kernel"), ("AG+GEMM fused, device", *COUNTED), ANY),
    Fault("epoch not advanced by a kernel that stores", hook.accesses(".epoch", "store", hook.masked), DIRECT, ANY),
    # counters
    Fault("counters not reset by the host", hook.host_leaves_out("zero_", ".left"), (*GATHERS, *SCATTERS), ANY),
    Fault("counters not reset by a kernel that stores", hook.accesses(".direct.", "store", hook.masked), DIRECT, ANY),
    Fault("every other tile is skipped", hook.accesses(".claimed", "atomic", hook.amount(2)), (*GATHERS, *SCATTERS), ANY),
    Fault("every other sum is skipped", hook.accesses(".claimed", "atomic", hook.amount(2)), ("AR in two",), ANY),
    Fault("every other piece is skipped", hook.accesses(".sent", "atomic", hook.amount(2)), STORED, ANY),
    Fault("tiles are counted twice", hook.accesses(*COUNT, hook.amount(2)), SCATTERS),
    Fault("signal before the last part", hook.accesses(*COUNT, hook.same, lambda seen: seen + 1), SHOTS),
    Fault("tiles are not counted", hook.accesses(*COUNT, hook.masked), (*SCATTERS, *SHOTS), STOPS),
    Fault("counted without barrier", hook.left_out("CTA barrier"), ("GEMM+RS fused", "GEMM+RS direct", *SHOTS), "CTA bar"),
    Fault("count does not acquire", hook.accesses(*COUNT, hook.ordered("RELEASE")), ("GEMM+RS direct", *SHOTS), COUNTS),
    Fault("count does not release", hook.accesses(*COUNT, hook.ordered("ACQUIRE")), ("GEMM+RS direct", *SHOTS), COUNTS),
    Fault("leaves relaxed", hook.accesses(".left", "atomic", hook.ordered("RELAXED")), DIRECT, "leaves with"),
    Fault("leaves without acquire", hook.accesses(".left", "atomic", hook.ordered("RELEASE")), DIRECT, "leaves with"),
    # between nodes
    Fault("what crosses is not awaited", lambda: hook.nothing_is_awaited(), NCCL, ANY),
    Fault("zeros cross", hook.exchanges(with_zeros), NCCL),
    Fault("put signals before its data", hook.puts(hook.put_signal_first), NVSHMEM),
    Fault("put leaves its data out", hook.puts(hook.put_without_data), NVSHMEM),
    Fault("put left out", hook.puts(hook.put_left_out), NVSHMEM, STOPS),
]  # fmt: skip
CASES = [pytest.param(fault, name, id=f"{fault.name}, {name}") for fault in FAULTS for name in fault.programs]


@pytest.mark.parametrize("name", list(programs()))
def test_program_passes(name: str) -> None:
    assert_passes(programs()[name], range(1))


@pytest.mark.parametrize(("fault", "name"), CASES)
def test_fault_is_caught(fault: Fault, name: str) -> None:
    with fault.plant():
        error = assert_caught(programs()[name], SEEDS)
    assert re.search(fault.report, str(error)), error
