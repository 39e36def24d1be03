"""Groups of GPUs that span nodes with NVSHMEM between them: the real engine, operators and transport on simulated streams.

NVSHMEM is a stand-in (simulated_nodes.py): a put has left when its stream goes on, then its data arrive, and then its signal.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("greenlet")

from tests.protocol.explore import Build, assert_caught, assert_passes, run_seed
from tests.protocol.faults import Fault
from tests.protocol.simulated_nodes import NodeSimulation
from tests.protocol.simulated_ranks import core
from tests.protocol.test_interleaving_node_exchanges import exchanged_backward
from tests.protocol.test_interleaving_nodes import (
    CROSSINGS,
    PROBLEMS,
    SIZES,
    STREAMS,
    backward,
    in_networks,
    in_turns,
    wrong_calls,
)


def problem(operator: str, world: int, node_ranks: int, one_queue: bool = False, method: str = "chunked") -> Build:
    """Four calls: the fourth is the first that can take a slot too early."""
    machine = NodeSimulation(world, node_ranks=node_ranks, one_queue=one_queue, puts=True)
    return PROBLEMS[operator](method, machine, 4)


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize(("world", "node_ranks"), SIZES)
@pytest.mark.parametrize("operator", PROBLEMS)
def test_operators_pass(operator: str, world: int, node_ranks: int, one_queue: bool) -> None:
    assert_passes(problem(operator, world, node_ranks, one_queue), range(8 // world))


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize(("world", "node_ranks"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("operator", PROBLEMS)
def test_operators_by_a_kernel_pass(operator: str, world: int, node_ranks: int, one_queue: bool) -> None:
    assert_passes(problem(operator, world, node_ranks, one_queue, "fused"), range(8 // world))


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize(("world", "node_ranks"), [(2, 1), (4, 2)])
def test_backward_passes_of_two_calls_each(world: int, node_ranks: int, one_queue: bool) -> None:
    """So there are too few slots, and a barrier comes between: of signals without data."""
    for build in (backward, exchanged_backward):
        assert_passes(build(NodeSimulation(world, node_ranks=node_ranks, one_queue=one_queue, puts=True)), range(3))


@pytest.mark.parametrize("one_queue", [False, True])
def test_operators_of_all_kinds_follow_each_other(one_queue: bool) -> None:
    for order in ("rghrs", "hshrgr"):
        assert_passes(in_turns(NodeSimulation(4, node_ranks=2, one_queue=one_queue, puts=True), order), range(3))


PUT = "            self.network.put(source, call.place(crossing.sent), call.word, self._sending.cuda_stream)\n"
STAGED = "        self._driver.check(self._driver.copy(staged, source.data_ptr(), nbytes, stream))\n"
FAULTS = {
    "put before it is added up": (
        in_networks(f"            if make is not None:\n                make()\n{PUT}",
                    f"{PUT}            if make is not None:\n                make()\n", "wrong|deadlock|Mismatch"),
        "scatter 4 2",
    ),
    "put in the caller's stream": (
        in_networks("call.word, self._sending.cuda_stream)", "call.word, 0)", "wrong|deadlock|Mismatch"),
        "scatter 4 2",
    ),
    "nothing is staged": (Fault("nodes.puts", STAGED, ""), "gather 2 1"),
    "a signal of the call before": (in_networks("call.word,", "call.word - (1 << 32),", "deadlock"), "gather 2 1"),
    "a put without its signal": (
        Fault("nodes.puts", "nbytes, *told)", "nbytes, self._start, *told[1:])", "deadlock|wrong"), "to_heads 2 1",
    ),
    "all is for the twin": (
        Fault("nodes.puts", "self._set, place.rank, stream)", "self._set, place.receiver, stream)", "wrong|deadlock"),
        "to_rows 4 2",
    ),
    "what has come is passed on before it is there": (
        in_networks("            call.wait_chunk(received.fills, received.chunk)  # bounded, and it notices a twin that is in "
                    "another call\n            self._pass_on(call.routes(passed_on), call.blocks)\n",
                    "            self._pass_on(call.routes(passed_on), call.blocks)\n", "wrong|deadlock|Mismatch"),
        "gather 4 2",
    ),
    "what comes is looked for by the epoch before": (
        in_networks(
            "        self._driver.check(self._driver.wait_event(self._arriving.cuda_stream, mark, 0))\n", "", "wrong|deadlock"
        ),
        "gather 4 2",
    ),
    "nothing is passed on": (in_networks("if crossing.lands or not passed_on.all:", "if True:", "deadlock"), "gather 4 2"),
    "what needs no landing lands": (
        in_networks("if crossing.lands or not passed_on.all:", "if not passed_on.all:", ".*"), "to_heads 4 2",
    ),
    "a block leaves before its product": (
        Fault(CROSSINGS, "engine.send_after(marks.popleft())", "marks.popleft()", "wrong|deadlock|Mismatch"), "to_heads 2 1",
    ),
    "sums of other nodes are not waited for": (
        Fault(STREAMS, "            call.wait(block)\n", "            pass\n"), "scatter 2 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    fault, where = FAULTS[name]
    operator, world, node_ranks = where.split()
    with fault.planted():
        error = assert_caught(problem(operator, int(world), int(node_ranks)), range(30))
    assert re.search(fault.report, str(error)), error


def test_a_twin_in_another_call_is_named() -> None:
    """The word is the sender's."""
    build, faults = wrong_calls(NodeSimulation(2, timeout_s=3e-7, puts=True), lambda rank: f"layer {rank}")
    run_seed(build, 0, spin=True)
    for rank, fault in faults.items():
        with pytest.raises(core("group.signals").OverlapMismatchError, match=f"rank {rank} is in layer {rank}"):
            fault.check()
