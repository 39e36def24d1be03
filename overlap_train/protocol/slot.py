"""Slots, signals and epochs.

A slot is W blocks in symmetric memory, block s written by rank s alone, in one or more chunks of rows, with one signal a chunk.
The epoch counts the uses of a slot. A signal carries the epoch and the fingerprint of the call whose chunk is there (tags.py).
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from typing import Protocol

import torch

from ..gpu.launch import LaunchCache, Launcher
from ..kernels.signal_words import FIRST_COUNTERS, MAX_CHUNKS
from ..planning.cache import BoundedCache
from ..planning.schedule import Leg, Legs, Topology, targets
from ..symmetric import SymmetricHeap
from .copy_engine import Route
from .layout import Layout
from .tags import Tag

_MOST_CALLS = 256  # kinds of calls that a slot remembers


def _addresses(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=device)


class Counters:
    """What the CTAs of one kernel count together, int64 words on the device, in the order of kernels/signal_words.py."""

    def __init__(self, words: torch.Tensor) -> None:
        self.left = words[:1]  # CTAs that have exited
        self.claimed = words[1:2]  # tiles that a CTA has taken
        self.sent = words[2:3]  # pieces of the own rows that a CTA has taken to store them at the peers
        self.complete = words[FIRST_COUNTERS:]  # stored tiles, or pieces, by destination and chunk


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
        start, size = layout.flagged_offset(index), layout.flagged_size(index)
        flagged = [view[start : start + size].view(torch.int64) for view in views]
        self.flagged = flagged[rank]  # int64, in W blocks as large as the call wants them, block s written by rank s
        self.flagged_at = _addresses(flagged, device)  # int64 [W]
        self._count(world, device)

    def _count(self, world: int, device: torch.device) -> None:
        """Make what this rank alone counts."""
        count = FIRST_COUNTERS + world * MAX_CHUNKS
        self.control = torch.zeros(1 + count, dtype=torch.int64, device=device)
        self.epoch = self.control[:1]  # as a signal has it; on the device, where a replayed graph goes on counting
        self.counters = Counters(self.control[1:])  # reset when the epoch advances
        # of kernels that send everything themselves: at their end they reset these, and advance the epoch that no copy sends
        self.direct_counters = Counters(torch.zeros(count, dtype=torch.int64, device=device))
        self.calls: BoundedCache[Hashable, Call] = BoundedCache(_MOST_CALLS)


class Waits(Protocol):
    """What a call needs to wait, of all calls of its domain (waits.py)."""

    rank: int
    world_size: int
    launcher: Launcher | None

    def next_epoch(self, call: Call) -> None:
        """Advance the slot's epoch to `call.tag` and reset its counters, before copies send anything."""
        ...

    def wait(self, call: Call, first: int, count: int) -> None:
        """Hold the caller's stream (on the CPU: the caller) until the blocks of `count` ranks from `first` on are here."""
        ...

    def barrier(self, call: Call) -> None:
        """Advance the slot's epoch, send it to every peer as the signal of chunk 0, and wait for the same of each."""
        ...


class Call:
    """One kind of use of one slot: blocks [W, *block shape] of one dtype, each sent in `chunks` equal parts.

    Everything here holds for every call of that kind, of whatever linear, but `tag`: the call that uses the slot now.
    """

    tag: Tag

    def __init__(self, waits: Waits, slot: Slot, shape: torch.Size, dtype: torch.dtype, chunks: int) -> None:
        self._waits = waits
        self.slot, self.chunks = slot, chunks
        self.rank, self.world_size = waits.rank, waits.world_size
        self._shape, self._dtype = shape, dtype
        self.peers = targets(Topology(1, self.world_size, self.rank))
        self.launches = LaunchCache(waits.launcher)
        self._routes: BoundedCache[tuple[Legs, int, int], list[Route]] = BoundedCache(_MOST_CALLS)

    @cached_property
    def blocks(self) -> torch.Tensor:
        """Of this rank [W, *block shape]; a call whose data come as flagged words has none."""
        return self._blocks(self.slot.memory[self.rank])

    @torch.inference_mode(False)  # a view of an inference tensor is one, which later calls could not write
    def _blocks(self, memory: torch.Tensor) -> torch.Tensor:
        count = self.world_size * self._shape.numel()
        return memory[: count * self._dtype.itemsize].view(self._dtype).view(self.world_size, *self._shape)

    def remote_block(self, peer: int) -> torch.Tensor:
        """Where this rank's block [block shape] goes at `peer`."""
        return self._blocks(self.slot.memory[peer])[self.rank]

    def routes(self, legs: Legs, tiles: int = 0, pitch: int = 0) -> list[Route]:
        """The copy engine's way for each leg of a schedule.

        Args:
            tiles: how many stored tiles complete a chunk, for legs that leave after them.
            pitch: elements from one block of the source to the next; 0: they lie one after the other.
        """
        pitch = pitch or self._shape.numel()
        key = (legs, tiles, pitch)
        return self._routes.get(key) or self._routes.put(key, [self._route(leg, tiles, pitch) for leg in legs])

    def _route(self, leg: Leg, tiles: int, pitch: int) -> Route:
        chunk = self.remote_block(leg.target).chunk(self.chunks)[leg.chunk]
        first = leg.block * pitch + leg.chunk * chunk.numel()
        word = leg.target * MAX_CHUNKS + leg.chunk
        after = (self.slot.counters.complete[word : word + 1], tiles) if leg.after_tiles else None
        signal = self.slot.outgoing[leg.target][leg.chunk : leg.chunk + 1]
        return Route(first, chunk, signal, self.slot.epoch, after)

    def next_epoch(self) -> None:
        """Before copies send anything. Kernels that send everything themselves advance the epoch at their end."""
        self._waits.next_epoch(self)

    def wait(self, source: int) -> None:
        """Hold the caller's stream (on the CPU: the caller) until the block of rank `source` is here."""
        self._waits.wait(self, source, 1)

    def wait_for_all(self) -> None:
        """Hold the caller's stream until the blocks of all other ranks are here."""
        self._waits.wait(self, 0, self.world_size)

    def barrier(self) -> None:
        """Hold the caller's stream (on the CPU: the caller) until every rank has come here; no block is sent."""
        self._waits.barrier(self)
