"""Simulated ranks with a GPU each, in two groups: tensor parallelism of two ranks, and Ulysses.

Rank t + 2 r has tensor-parallel rank t and rank r of Ulysses. Each group has a heap, slots and side streams of its own; a rank's
side streams and its caller's stream are on one GPU. Ulysses' groups may span nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch

from tests.protocol.interleaving import Scheduler
from tests.protocol.simulated_blas import SimulatedBlas
from tests.protocol.simulated_gpu import Operation, SimulatedDriver, SimulatedGpu
from tests.protocol.simulated_nodes import NodeSimulation
from tests.protocol.simulated_ranks import SLOT_BYTES, Memory, SimulatedDomain, SimulatedHeap, core
from tests.protocol.simulated_streams import StreamSimulation


@dataclass(frozen=True)
class GridRank:
    """One rank as its host sees it."""

    rank: int
    tensor: SimulatedDomain
    ulysses: SimulatedDomain


@dataclass(frozen=True)
class _Group(StreamSimulation):
    """One group. members: its ranks, by their numbers in all."""

    members: tuple[int, ...] = ()

    def engine(self, scheduler: Scheduler, rank: int) -> Any:
        """A side stream more on the GPU of that member."""
        gpu = _gpu_of(self, scheduler, self.members[rank])
        with mock.patch.object(torch.cuda, "Stream", gpu.new_stream):
            return core("group.copy_engine").StreamCopyEngine(torch.device("cpu"), SimulatedDriver(gpu))


@dataclass(frozen=True)
class _FarGroup(NodeSimulation):
    """One group that spans nodes. members: as above."""

    members: tuple[int, ...] = ()

    def new_gpu(self, scheduler: Scheduler, rank: int) -> SimulatedGpu:
        return _gpu_of(self, scheduler, self.members[rank])


def _gpu_of(group: _Group | _FarGroup, scheduler: Scheduler, member: int) -> SimulatedGpu:
    if member not in group.gpus:
        group.gpus[member] = SimulatedGpu(scheduler, member, group.one_queue)
    return group.gpus[member]


def _domains(group: _Group | _FarGroup, scheduler: Scheduler) -> dict[int, SimulatedDomain]:
    """By the members' numbers in all."""
    layout = core("group.slots").Layout(group.world_size, SLOT_BYTES, 0)
    heap = SimulatedHeap(group.world_size, layout)
    group.memory.update({rank: Memory() for rank in range(group.world_size)})
    found = {}
    for rank, member in enumerate(group.members):
        found[member] = domain = group.domain(scheduler, heap, layout, rank)
        _name_words(group.members, scheduler, heap, domain, member)
    return found


def _name_words(
    members: tuple[int, ...], scheduler: Scheduler, heap: Any, domain: SimulatedDomain, member: int
) -> None:
    chunks, group = core("kernels.signal_words").MAX_CHUNKS, f"group{members}.rank{member}"
    count = (len(domain.workspace.slots) + 1) * domain.world_size * chunks
    words = heap.view(domain.rank)[: 8 * count].view(torch.int64).view(-1, domain.world_size, chunks)
    slots = {f"{group}.slot{i}.epoch": slot.epoch for i, slot in enumerate(domain.workspace.slots)}
    scheduler.watch(**{f"{group}.signals": words, f"{group}.abort": domain.fault.abort, **slots})


@dataclass(frozen=True)
class GridSimulation(StreamSimulation):
    """world_size: of both groups together. node_ranks: how many of a Ulysses group each node has; 0: all. puts: NVSHMEM is
    between the nodes instead of NCCL."""

    world_size: int = 4
    node_ranks: int = 0
    puts: bool = False
    blas: SimulatedBlas = field(default_factory=SimulatedBlas)

    def spawn_grid(self, scheduler: Scheduler, body: Callable[[GridRank], None]) -> None:
        """One host actor per rank that runs `body`; the rank's streams end once they have run everything."""
        self.gpus.clear()
        self.memory.update({rank: Memory() for rank in range(self.world_size)})
        self.patch(scheduler)
        self.blas.patch(scheduler)
        ranks = range(self.world_size)
        tensor = self._of_all(scheduler, [tuple(ranks[first : first + 2]) for first in ranks[::2]], _Group)
        ulysses = self._of_all(scheduler, [tuple(ranks[first::2]) for first in range(2)], self._of_ulysses)

        def host(rank: int) -> None:
            try:
                body(GridRank(rank, tensor[rank], ulysses[rank]))
            finally:
                self.gpus[rank].close()

        for rank in ranks:
            scheduler.spawn(f"host{rank}", partial(host, rank), rank=rank)

    def enqueued(self, rank: int, operation: Operation) -> Operation:
        return self.blas.enqueued(rank, operation)

    def _of_all(
        self, scheduler: Scheduler, groups: list[tuple[int, ...]], make: Callable[..., _Group | _FarGroup]
    ) -> dict[int, SimulatedDomain]:
        found: dict[int, SimulatedDomain] = {}
        for members in groups:
            group = make(len(members), one_queue=self.one_queue, gpus=self.gpus, members=members)
            found |= _domains(group, scheduler)
        return found

    def _of_ulysses(self, world_size: int, **settings: Any) -> _Group | _FarGroup:
        if not self.node_ranks:
            return _Group(world_size, **settings)
        return _FarGroup(world_size, node_ranks=self.node_ranks, puts=self.puts, blas=self.blas, **settings)
