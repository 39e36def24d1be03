"""Four simulated ranks with a GPU each, in two groups: tensor parallelism of two ranks, and Ulysses of two.

Rank t + 2 r has tensor-parallel rank t and rank r of Ulysses. Each group has a heap, slots and a copy stream of its own; a rank's
two copy streams and its caller's stream are on one GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from tests.protocol.interleaving import Scheduler
from tests.protocol.simulated_gpu import SimulatedDriver, SimulatedGpu
from tests.protocol.simulated_ranks import SLOT_BYTES, Memory, SimulatedDomain, SimulatedHeap, core
from tests.protocol.simulated_streams import StreamSimulation

TENSOR = ((0, 1), (2, 3))
ULYSSES = ((0, 2), (1, 3))


@dataclass(frozen=True)
class GridRank:
    """One rank as its host sees it."""

    rank: int
    tensor: SimulatedDomain
    ulysses: SimulatedDomain


@dataclass(frozen=True)
class _Pair(StreamSimulation):
    """One group: two of the four ranks, by their numbers in all."""

    members: tuple[int, ...] = ()

    def engine(self, scheduler: Scheduler, rank: int) -> Any:
        """A side stream more on the GPU of that member."""
        member = self.members[rank]
        if member not in self.gpus:
            self.gpus[member] = SimulatedGpu(scheduler, member, self.one_queue)
        gpu = self.gpus[member]
        with mock.patch.object(torch.cuda, "Stream", gpu.new_stream):
            return core("protocol.copy_engine").StreamCopyEngine(torch.device("cpu"), SimulatedDriver(gpu))

    def domains(self, scheduler: Scheduler) -> dict[int, SimulatedDomain]:
        """By the members' numbers in all."""
        layout = core("protocol.layout").Layout(self.world_size, SLOT_BYTES, 0)
        heap = SimulatedHeap(self.world_size, layout)
        self.memory.update({rank: Memory() for rank in range(self.world_size)})
        found = {}
        for rank, member in enumerate(self.members):
            found[member] = domain = self.domain(scheduler, heap, layout, rank)
            self._name_words(scheduler, heap, domain, member)
        return found

    def _name_words(self, scheduler: Scheduler, heap: Any, domain: SimulatedDomain, member: int) -> None:
        chunks, group = core("kernels.signal_words").MAX_CHUNKS, f"group{self.members}.rank{member}"
        count = (len(domain.workspace.slots) + 1) * domain.world_size * chunks
        words = heap.view(domain.rank)[: 8 * count].view(torch.int64).view(-1, domain.world_size, chunks)
        slots = {f"{group}.slot{i}.epoch": slot.epoch for i, slot in enumerate(domain.workspace.slots)}
        scheduler.watch(**{f"{group}.signals": words, f"{group}.abort": domain.fault.abort, **slots})


@dataclass(frozen=True)
class GridSimulation(StreamSimulation):
    """world_size: 4."""

    world_size: int = 4

    def spawn_grid(self, scheduler: Scheduler, body: Callable[[GridRank], None]) -> None:
        """One host actor per rank that runs `body`; the rank's streams end once they have run everything."""
        self.gpus.clear()
        self.memory.update({rank: Memory() for rank in range(self.world_size)})
        self.patch(scheduler)
        tensor, ulysses = (self._domains(scheduler, pairs) for pairs in (TENSOR, ULYSSES))

        def host(rank: int) -> None:
            try:
                body(GridRank(rank, tensor[rank], ulysses[rank]))
            finally:
                self.gpus[rank].close()

        for rank in range(self.world_size):
            scheduler.spawn(f"host{rank}", partial(host, rank), rank=rank)

    def _domains(self, scheduler: Scheduler, pairs: tuple[tuple[int, ...], ...]) -> dict[int, SimulatedDomain]:
        found: dict[int, SimulatedDomain] = {}
        for members in pairs:
            pair = _Pair(2, one_queue=self.one_queue, gpus=self.gpus, members=members)
            found |= pair.domains(scheduler)
        return found
