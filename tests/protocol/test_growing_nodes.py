"""Symmetric memory of several nodes grows behind an operator that raised: what is still on the wire stays out of the new one."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap_train import OverlapConfig, linear_reduce_scatter
from overlap_train.nodes.gloo import HostEngine
from tests.processes import run_ranks, values


class SlowGroup:
    """A process group of gloo on a network that buffers: who sends goes on at once. What is sent stays on the wire until
    `released`, and for a tenth of a second."""

    def __init__(self, group: Any) -> None:
        self._group, self.released, self.recv = group, threading.Event(), group.recv
        self._wire: queue.SimpleQueue[tuple[torch.Tensor, int, int]] = queue.SimpleQueue()
        threading.Thread(target=self._carry, daemon=True).start()

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> Any:
        self._wire.put((tensors[0].clone(), target, tag))
        return mock.Mock()

    def _carry(self) -> None:
        while True:
            sent, target, tag = self._wire.get()
            self.released.wait()
            time.sleep(0.1)
            self._group.send([sent], target, tag).wait()


def _grow(rank: int, world: int) -> list[list[float]]:
    """All ranks raise when they have sent a partial sum, which comes when they meet next. Then rows are many more."""
    groups: list[SlowGroup] = []
    connect, knock, product = dist.ProcessGroupGloo, HostEngine.barrier, torch.mm

    def slowly(*arguments: Any) -> SlowGroup:
        groups.append(SlowGroup(connect(*arguments)))
        groups[0].released.set()
        return groups[0]

    def barrier(*arguments: Any) -> None:
        knock(*arguments)
        groups[0].released.set()

    def scatter(rows: int, value: float) -> list[float]:
        x = torch.full((rows, 8), value)
        y = linear_reduce_scatter(x, torch.ones(8, 8), group=dist.group.WORLD, config=config)
        return sorted(set(y.flatten().tolist()))

    config = OverlapConfig(method="chunked", node_ranks=1, timeout_s=10.0)
    with mock.patch.object(dist, "ProcessGroupGloo", slowly), mock.patch.object(HostEngine, "barrier", barrier):
        for step in range(6):
            scatter(4, float(step))
        groups[0].released.clear()
        with (
            mock.patch.object(torch, "mm", side_effect=[product(torch.ones(2, 8), torch.ones(8, 8)), MemoryError]),
            pytest.raises(MemoryError),
        ):
            scatter(4, 7.0)
        results = [scatter(64, 100.0 + step) for step in range(3)]
        dist.barrier()  # a process that ends takes along what its wire still carries
        return results


def test_what_an_operator_that_raised_has_sent_does_not_come_into_larger_memory() -> None:
    """Its epoch is higher than those of the new memory: it would pass for a later call."""
    for results in values(run_ranks(2, _grow, limit_s=60)):
        assert results == [[world_sum] for world_sum in (1600.0, 1616.0, 1632.0)]
