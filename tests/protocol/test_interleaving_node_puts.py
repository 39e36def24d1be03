"""Groups of GPUs that span nodes with NVSHMEM between them: the real engine, operators and transport on simulated streams.

NVSHMEM is a stand-in (simulated_nodes.py): a put has left when its stream goes on, then its data arrive, and then its signal.
"""

from __future__ import annotations

import pytest

pytest.importorskip("greenlet")

from tests.protocol.explore import Build, assert_passes, run_seed
from tests.protocol.simulated_nodes import NodeSimulation
from tests.protocol.simulated_ranks import core
from tests.protocol.test_interleaving_node_exchanges import exchanged_backward
from tests.protocol.test_interleaving_nodes import (
    PROBLEMS,
    SIZES,
    backward,
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


def test_a_twin_in_another_call_is_named() -> None:
    """The word is the sender's."""
    build, faults = wrong_calls(NodeSimulation(2, timeout_s=3e-7, puts=True), lambda rank: f"layer {rank}")
    run_seed(build, 0, spin=True)
    for rank, fault in faults.items():
        with pytest.raises(core("group.signals").OverlapMismatchError, match=f"rank {rank} is in layer {rank}"):
            fault.check()
