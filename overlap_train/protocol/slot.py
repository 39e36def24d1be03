"""Slots, signals and epochs.

A slot is W blocks in symmetric memory, block s written by rank s alone, in one or more chunks of rows, with one signal a chunk.
The epoch counts the uses of a slot; a signal carries the epoch of the chunk that is there.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import torch

from ..driver import CudaDriver
from ..kernels.signal_words import FIRST_COUNTERS, MAX_CHUNKS
from ..packed_launch import LaunchCache
from ..symmetric import SymmetricHeap
from .copy_engine import Route
from .layout import Layout
from .watchdog import Waiting


def _addresses(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=device)


class Counters:
    """What the CTAs of one kernel count together, int64 words on the device, in the order of kernels/signal_words.py."""

    def __init__(self, words: torch.Tensor) -> None:
        self.left = words[:1]  # CTAs that are at their end
        self.claimed = words[1:2]  # tiles taken by some CTA
        self.sent = words[2:3]  # pieces of the own rows taken by some CTA that stores them at the peers
        self.complete = words[FIRST_COUNTERS:]  # tiles, or pieces, written, by destination and chunk


class Slot:
    """One slot as this rank sees it, and as it sees the peers'."""

    def __init__(self, heap: SymmetricHeap, layout: Layout, index: int, rank: int, device: torch.device) -> None:
        start, words = layout.offset(index), layout.signals_offset(index)
        size, world = layout.size(index), layout.world_size
        views = [heap.view(peer) for peer in range(world)]
        self.memory = [view[start : start + size] for view in views]
        signals = [
            view[words : words + layout.signals_bytes].view(torch.int64).view(world, MAX_CHUNKS) for view in views
        ]
        self.signals = signals[rank]  # int64 [W, MAX_CHUNKS], row s written by rank s
        self.outgoing = [words[rank] for words in signals]  # the row that this rank writes at each peer
        self.outgoing_at = _addresses(self.outgoing, device)  # int64 [W], for kernels that signal peers themselves
        self.memory_at = _addresses(self.memory, device)  # int64 [W], for kernels that store at peers themselves
        count = FIRST_COUNTERS + world * MAX_CHUNKS
        self.control = torch.zeros(1 + count, dtype=torch.int64, device=device)
        self.epoch = self.control[:1]  # on the device, so that a replayed graph counts on
        self.counters = Counters(self.control[1:])  # zeroed when the epoch is counted
        # of kernels that send all there is themselves: at their end they zero them, and count the epoch, which no copy sends
        self.direct_counters = Counters(torch.zeros(count, dtype=torch.int64, device=device))
        self._increment = torch.zeros_like(self.control)
        self._increment[0] = 1
        self._keep = self._increment.clone()
        self.calls: dict[Hashable, Call] = {}

    def next_epoch(self) -> None:
        """Epoch + 1, all counters 0, before anything is sent; in one kernel, because each costs 5 microseconds of host time."""
        torch.addcmul(self._increment, self.control, self._keep, out=self.control)


class Waits(Protocol):
    """What a call needs to wait, of all calls of its domain (waits.py)."""

    rank: int
    world_size: int
    timeout_s: float
    driver: CudaDriver | None

    def wait(self, call: Call, first: int, count: int) -> None:
        """Hold the caller's stream (on the CPU: the caller) until the blocks of `count` ranks from `first` on are here."""
        ...

    def meet(self, call: Call) -> None:
        """Count the slot's epoch, send it to every peer as the signal of chunk 0, and wait for the same of each."""
        ...


class Call:
    """One kind of use of one slot: blocks [W, *block shape] of one dtype, each sent in `chunks` equal parts, under one name.

    Everything here holds for every call of that kind, so that a call makes none of it.
    """

    def __init__(self, waits: Waits, slot: Slot, shape: torch.Size, dtype: torch.dtype, op: str, chunks: int) -> None:
        self._waits = waits
        self.slot = slot
        self.op, self.chunks = op, chunks
        self.rank, self.world_size = waits.rank, waits.world_size
        self._shape, self._dtype = shape, dtype
        self.blocks = self._blocks(slot.memory[self.rank])
        # all other ranks, nearest following first: the order in which blocks are pushed
        self.peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        # and nearest preceding first: the order in which their blocks arrive
        self.sources = [(self.rank - step) % self.world_size for step in range(1, self.world_size)]
        self.launches = LaunchCache(waits.driver)
        self._routes: dict[Hashable, list[Route]] = {}

    @torch.inference_mode(
        False
    )  # a view as another dtype would be an inference tensor, which later calls could not write
    def _blocks(self, memory: torch.Tensor) -> torch.Tensor:
        count = self.world_size * self._shape.numel()
        return memory[: count * self._dtype.itemsize].view(self._dtype).view(self.world_size, *self._shape)

    def landing(self, peer: int) -> torch.Tensor:
        """Where this rank's block [block shape] goes at `peer`."""
        return self._blocks(self.slot.memory[peer])[self.rank]

    def broadcast(self) -> list[Route]:
        """To every peer: this rank's block, the source of the pushes."""
        if "broadcast" not in self._routes:
            self._routes["broadcast"] = [route for peer in self.peers for route in self._routes_to(peer, 0, None)]
        return self._routes["broadcast"]

    def deliver(self, target: int | None, tiles: int | None = None) -> list[Route]:
        """Block d of the source [W, *block shape] to rank d, for d = target or, with None, for every peer.

        Args:
            tiles: a kernel writes the blocks: send a chunk when this many of its tiles are complete. None: send at once.
        """
        routes = self._routes.get((target, tiles))
        if routes is None:
            size = self._shape.numel()
            targets = self.peers if target is None else [target]
            routes = [route for peer in targets for route in self._routes_to(peer, peer * size, tiles)]
            self._routes[target, tiles] = routes
        return routes

    def _routes_to(self, peer: int, first: int, tiles: int | None) -> list[Route]:
        """A block's way to `peer`, chunk by chunk; it starts at element `first` of the source."""
        target = self.landing(peer)
        signals = self.slot.outgoing[peer].split(1)
        complete = self.slot.counters.complete.split(1)[peer * MAX_CHUNKS :]
        size = target.numel() // self.chunks
        return [
            Route(first + i * size, place, signals[i], self.slot.epoch, None if tiles is None else (complete[i], tiles))
            for i, place in enumerate(target.chunk(self.chunks))
        ]

    def wait(self, source: int) -> None:
        """Hold the caller's stream (on the CPU: the caller) until the block of rank `source` is here."""
        self._waits.wait(self, source, 1)

    def wait_for_all(self) -> None:
        """Hold the caller's stream until the blocks of all other ranks are here."""
        self._waits.wait(self, 0, self.world_size)

    def meet(self) -> None:
        """Hold the caller's stream (on the CPU: the caller) until every rank has come here; no block is sent."""
        self._waits.meet(self)

    def waiting(self, source: int, chunk: int = 0) -> Waiting:
        return Waiting(self.op, self.rank, source, chunk, self._waits.timeout_s)
