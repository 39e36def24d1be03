"""No product's kernel holds SMs until the network has brought something: NCCL's kernels may need those SMs to bring it.

A persistent kernel takes the tiles whose chunks are here, leaves, and goes on in its next launch (kernels/arrivals.py).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("greenlet")

import torch

from tests.protocol.explore import Build, assert_passes, run_seed
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import integers, tag_of
from tests.protocol.simulated_nodes import NodeSimulation, SimulatedNccl
from tests.protocol.simulated_ranks import TILE, SimulatedDomain
from tests.protocol.test_interleaving_node_exchanges import exchanged_backward
from tests.protocol.test_interleaving_nodes import METHODS, PROBLEMS, backward, started
from tests.protocol.test_interleaving_parts import passes


def without_room(build: Build) -> Build:
    """The same problem where an exchange finds SMs only while no product runs on its GPU, as if other communicators had taken
    those that products spare."""
    running, exchange = Counter[int](), SimulatedNccl._run

    def crowded(scheduler: Scheduler) -> Any:
        launch = scheduler.launch

        def counted(name: str, *what: Any) -> None:
            rank, is_product = scheduler.running_actor().rank, "gemm" in name
            running[rank] += is_product
            launch(name, *what)
            running[rank] -= is_product

        def late(network: SimulatedNccl, *what: Any) -> None:
            scheduler.wait_until(lambda: not running[network._gpu.rank], "SMs for an exchange")
            exchange(network, *what)

        running.clear()
        scheduler.patch(scheduler, "launch", counted)
        scheduler.patch(SimulatedNccl, "_run", late)
        return build(scheduler)

    return crowded


@pytest.mark.parametrize(("world", "node_ranks"), [(2, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("operator", PROBLEMS)
def test_operators_pass(operator: str, method: str, world: int, node_ranks: int) -> None:
    build = PROBLEMS[operator](method, NodeSimulation(world, node_ranks=node_ranks), 4)
    assert_passes(without_room(build), range(4 // world))


@pytest.mark.parametrize("method", METHODS)
def test_backward_passes(method: str) -> None:
    for build in (backward, exchanged_backward):
        machine = NodeSimulation(4, node_ranks=2, one_queue=build is backward, method=method)
        assert_passes(without_room(build(machine)), range(1))


@pytest.mark.parametrize("backward", [False, True])
def test_parts_of_a_long_sequence_pass(backward: bool) -> None:
    """Of each part all exchanges are enqueued before the part before it is multiplied."""
    machine = NodeSimulation(2, chunks=4) if backward else NodeSimulation(4, node_ranks=2, chunks=4)
    assert_passes(without_room(passes("fused", machine, backward)), range(1))


LAUNCHES = {"gather": 1 + 2, "to_rows": 2}  # of the own node's rows, and of each of two chunks


def with_a_late_exchange(machine: NodeSimulation, operator: str) -> tuple[Build, torch.Tensor]:
    """A call whose second exchange comes only when the last kernel has ended; what the ranks multiply: [2, 2, TILE, TILE]."""
    y, ended, exchange = torch.zeros(2, 2, TILE, TILE), Counter[int](), SimulatedNccl._run

    def build(scheduler: Scheduler) -> Any:
        launch = scheduler.launch

        def counted(name: str, *what: Any) -> None:
            rank = scheduler.running_actor().rank
            launch(name, *what)
            ended[rank] += "gemm" in name

        def late(network: SimulatedNccl, number: int, *what: Any) -> None:
            if number == 2:
                scheduler.wait_until(lambda: ended[network._gpu.rank] == LAUNCHES[operator], "the last kernel to end")
            exchange(network, number, *what)

        def host(domain: SimulatedDomain) -> None:
            x = integers(2 * TILE, TILE, seed=domain.rank)
            with domain.operator(tag_of("call"), slots=1):
                y[domain.rank] = started(domain, operator, x, "fused")()

        scheduler.patch(scheduler, "launch", counted)
        scheduler.patch(SimulatedNccl, "_run", late)
        machine.spawn_hosts(scheduler, host)
        scheduler.patch(torch.Tensor, "new_empty", torch.Tensor.new_zeros)  # else NaN is there from the beginning
        return lambda: None

    return build, y


@pytest.mark.parametrize("operator", LAUNCHES)
def test_what_a_wait_has_given_up_is_nan(operator: str) -> None:
    """The last launch does not leave: it takes the tiles whose chunks have not come."""
    build, y = with_a_late_exchange(NodeSimulation(2, timeout_s=3e-7), operator)
    run_seed(build, 0, spin=True)
    second_chunk = y[..., TILE // 2 :, :]
    far = torch.stack([second_chunk[0, 1], second_chunk[1, 0]]) if operator == "gather" else second_chunk
    assert far.isnan().all()
