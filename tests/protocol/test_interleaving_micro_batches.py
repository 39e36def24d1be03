"""Two micro-batches in one schedule, as Megatron runs models with experts beside their exchange: the forward of one between parts
of the other's backward, weight gradients delayed, collectives of another group in a stream of their own.

Megatron wants many hardware queues for it. With one, calls must be right, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("greenlet")

from tests.megatron.te_stand_in import WeightGradStore
from tests.protocol.explore import Build, assert_caught, assert_passes
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import integers
from tests.protocol.simulated_gpu import Operation, SimulatedDriver
from tests.protocol.simulated_ranks import TILE, SimulatedDomain
from tests.protocol.simulated_streams import StreamSimulation
from tests.protocol.test_interleaving_linear import Context, _backward, _forward, _reference, planned


class Exchanges:
    """Collectives of experts, in a stream of their own. One that has started waits there for all ranks'."""

    def __init__(self, machine: StreamSimulation, scheduler: Scheduler) -> None:
        self._machine, self._scheduler = machine, scheduler
        self._arrived: dict[str, set[int]] = {}
        self._streams: dict[int, Any] = {}

    def between(self, rank: int, name: str, event: int, driver: SimulatedDriver) -> None:
        """Enqueue one behind `event`, which is recorded behind it."""
        gpu = self._machine.gpus[rank]
        if rank not in self._streams:
            self._streams[rank] = gpu.new_stream()
        stream = self._streams[rank]
        arrived = self._arrived.setdefault(name, set())

        def run() -> None:
            arrived.add(rank)
            self._scheduler.wait_until(lambda: len(arrived) == self._machine.world_size, f"all ranks in {name}")

        driver.wait_event(stream.cuda_stream, event, 0)
        stream.enqueue(Operation(name, run))
        driver.record_event(event, stream.cuda_stream)


class Node:
    """One micro-batch of a rank: its event orders what it does in either stream."""

    def __init__(self, number: int, domain: SimulatedDomain, exchanges: Exchanges) -> None:
        self.number, self._rank, self._exchanges = number, domain.rank, exchanges
        self._driver: SimulatedDriver = domain.engine._driver
        self._event, self.contexts = self._driver.new_event(), (Context(True), Context(True))
        self._driver.record_event(self._event, self._driver.current_stream())

    def exchange(self, name: str) -> None:
        self._exchanges.between(self._rank, f"{name} of {self.number}", self._event, self._driver)

    def compute(self, work: Callable[[], Any]) -> Any:
        self._driver.wait_event(self._driver.current_stream(), self._event, 0)
        result = work()
        self._driver.record_event(self._event, self._driver.current_stream())
        return result


def schedule(method: str, machine: StreamSimulation, micro_batches: int = 4, swapped: int | None = None) -> Build:
    """Layers of a column and a row linear before the experts, whose products are left out. swapped: a rank that runs the forward
    of one micro-batch behind the other's backward."""
    world = machine.world_size
    x, dy = integers(micro_batches, world, TILE, TILE, seed=7), integers(micro_batches, world, TILE, TILE, seed=8)
    w1, w2 = integers(world, TILE, TILE, seed=9), integers(world, TILE, TILE, seed=10)

    def build(scheduler: Scheduler) -> Callable[[], None]:
        results: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        exchanges = Exchanges(machine, scheduler)

        def host(domain: SimulatedDomain) -> None:
            rank = domain.rank
            plans, weights = planned(domain, method, x[0, rank], w1[rank], w2[rank]), (w1[rank], w2[rank])
            for weight in weights:
                weight.wgrad_store = WeightGradStore(True)  # type: ignore[attr-defined]

            def forward(node: Node) -> None:
                y = node.compute(lambda: _forward(x[node.number, rank], *weights, plans, node.contexts))
                results[node.number, rank] = {"y": y}

            def backward(node: Node) -> None:
                found = node.compute(lambda: _backward(dy[node.number, rank], node.contexts))
                results[node.number, rank]["dx"] = found["dx"]

            def backward_dw(node: Node) -> None:
                for name, weight in zip(("dw1", "dw2"), weights, strict=True):
                    node.compute(weight.wgrad_store.pop)  # type: ignore[attr-defined]
                    results[node.number, rank][name], weight.grad = weight.grad, None  # type: ignore[assignment]

            running: Node | None = None
            for number in (*range(micro_batches), None):
                coming = None if number is None else Node(number, domain, exchanges)
                if running is not None:
                    running.exchange("combine, backward")
                if coming is not None and rank != swapped:
                    forward(coming)
                    coming.exchange("dispatch, forward")
                if running is not None:
                    running.exchange("dispatch, backward")
                if coming is not None and rank != swapped:
                    coming.exchange("combine, forward")
                if running is not None:
                    backward(running)
                    backward_dw(running)
                if coming is not None and rank == swapped:
                    forward(coming)
                    coming.exchange("dispatch, forward")
                    coming.exchange("combine, forward")
                running = coming

        machine.spawn_hosts(scheduler, host)

        def check() -> None:
            assert len(results) == micro_batches * world
            for (number, rank), found in results.items():
                right = _reference(x[number], dy[number], w1, w2, rank)
                wrong = [name for name in right if not torch.equal(found[name], right[name])]
                assert not wrong, f"micro-batch {number}, rank {rank}: {wrong}"

        return check

    return build


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize("method", ["chunked", "fused", "direct"])
def test_two_micro_batches_pass(method: str, one_queue: bool) -> None:
    machine = StreamSimulation(2, one_queue=one_queue)
    assert_passes(schedule(method, machine, micro_batches=3), range(2))


def test_three_ranks_pass_with_many_queues() -> None:
    assert_passes(schedule("chunked", StreamSimulation(3)), range(8))


def test_ranks_in_another_order_are_found() -> None:
    error = assert_caught(schedule("chunked", StreamSimulation(2), swapped=1), range(4))
    assert "Mismatch" in str(error) or "deadlock" in str(error), error
