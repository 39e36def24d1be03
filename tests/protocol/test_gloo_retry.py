"""Twins that could not be connected may try again, in the same domain."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_train.group.signals import FaultRecord
from overlap_train.nodes.gloo import GlooTransport
from overlap_train.nodes.slots import Place
from overlap_train.ranks.agreement import Agreement
from overlap_train.schedule.order import Topology
from tests.processes import run_ranks, values


def _second_attempt(rank: int, world: int) -> list[float]:
    agreement, topology, connect = Agreement(dist.group.WORLD, 20.0), Topology(2, 1, rank), dist.ProcessGroupGloo
    fault = FaultRecord(torch.device("cpu"), rank, 20.0)

    def refuse(*_: Any) -> Any:
        raise RuntimeError("no interface")

    if rank == 1:
        dist.ProcessGroupGloo = refuse
    with pytest.raises(RuntimeError, match=r"rank 1: gloo could not connect .*no interface"):
        GlooTransport(agreement, topology, 2.0, fault)
    dist.ProcessGroupGloo = connect
    time.sleep(1.0 - rank)  # rank 1 comes first, and would find what rank 0 has left
    transport = GlooTransport(agreement, topology, 20.0, fault)
    heap = torch.zeros(24, dtype=torch.uint8)
    transport.attach({rank: heap})
    agreement.barrier("attached")
    transport.put(torch.full((4,), 1.0 + rank), Place(1 - rank, 1 - rank, 0, 16), 7)
    transport.join()
    while heap[16] != 7:
        time.sleep(0.01)
    transport.close(orderly=True)
    return heap[:16].view(torch.float32).tolist()


def test_twins_that_could_not_be_connected_are_at_the_next_attempt() -> None:
    assert values(run_ranks(2, _second_attempt, limit_s=60)) == [[2.0] * 4, [1.0] * 4]
