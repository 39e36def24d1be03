"""The doctor's gathers between nodes of GPUs, on simulated streams, NCCL and NVSHMEM: right, and early signals found."""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("greenlet")

import torch

from overlap_train.tools.doctor.gathers import CHUNKS, FEATURES, Gathers
from tests.protocol import simulated_nodes
from tests.protocol.explore import Build, assert_caught, assert_passes
from tests.protocol.interleaving import Scheduler
from tests.protocol.simulated_gpu import Operation
from tests.protocol.simulated_nodes import NodeSimulation, SimulatedNccl, SimulatedNvshmem
from tests.protocol.simulated_ranks import SimulatedDomain

ROUNDS = 4  # the fourth is the first in a slot that was used before
BLOCK_BYTES = 4 * FEATURES * CHUNKS * 2  # two rows a chunk


def trial(machine: NodeSimulation) -> Build:
    """Some rounds of gathers, in which all pieces must be whole."""
    world = machine.world_size

    def build(scheduler: Scheduler) -> Any:
        broken = torch.ones(ROUNDS, world, world, CHUNKS)

        def host(domain: SimulatedDomain) -> None:
            domain.settled = lambda config: SimpleNamespace(network_sms=4, reduce_sms=0)  # type: ignore[attr-defined]
            domain.span.network_gbs = 0.0  # type: ignore[attr-defined]
            gathers = Gathers(domain, BLOCK_BYTES, torch.float32)  # type: ignore[arg-type]
            for turn in range(ROUNDS):
                broken[turn, domain.rank] = gathers.broken(turn)

        machine.spawn_hosts(scheduler, host)

        def check() -> None:
            assert not broken.any(), "pieces were not whole"

        return check

    return build


@pytest.mark.parametrize("puts", [False, True], ids=["nccl", "nvshmem"])
@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize(("world", "node_ranks"), [(2, 1), (4, 2), (3, 1)])
def test_pieces_are_whole(world: int, node_ranks: int, one_queue: bool, puts: bool) -> None:
    assert_passes(trial(NodeSimulation(world, node_ranks=node_ranks, one_queue=one_queue, puts=puts)), range(3))


def signals_early(patch: pytest.MonkeyPatch) -> None:
    """An exchange is said to have ended when its word is there. The data come after it."""
    move, exchange = simulated_nodes._move, SimulatedNccl.exchange
    moved, expected = Counter[int](), Counter[int]()  # pieces by their place

    def counted(scheduler: Scheduler, source: torch.Tensor, target: torch.Tensor) -> None:
        move(scheduler, source, target)
        moved[target.data_ptr()] += 1

    def early(self: SimulatedNccl, crossing: Any, sent: Any, received: Any) -> Any:
        found, place = exchange(self, crossing, sent, received), received.word.data_ptr()
        expected[place] += 1
        ready = partial(lambda count: moved[place] >= count, expected[place])
        found.arrive = lambda: self._gpu.current.enqueue(Operation("wait for the word", lambda: None, ready))  # type: ignore[method-assign]
        return found

    patch.setattr(simulated_nodes, "_move", counted)
    patch.setattr(SimulatedNccl, "exchange", early)


def test_a_signal_before_its_data_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    build = trial(NodeSimulation(2))

    def planted(scheduler: Scheduler) -> Any:
        monkeypatch.undo()  # places of another run
        signals_early(monkeypatch)
        return build(scheduler)

    assert "not whole" in str(assert_caught(planted, range(30)))


def test_a_put_whose_signal_comes_before_its_data_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    put = SimulatedNvshmem.putmem_signal_on_stream

    def early(self: SimulatedNvshmem, data: int, source: int, nbytes: int, *told: int) -> None:
        self.signal_op_on_stream(*told)
        put(self, data, source, nbytes, *told)

    monkeypatch.setattr(SimulatedNvshmem, "putmem_signal_on_stream", early)
    assert "not whole" in str(assert_caught(trial(NodeSimulation(2, puts=True)), range(30)))
