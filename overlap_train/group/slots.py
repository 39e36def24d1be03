"""Slots, signals and epochs, and where they lie in the symmetric heap.

A slot is W blocks in symmetric memory, block s written by rank s alone, in one or more chunks of rows, with one signal a chunk.
(In a call that is pulled a rank writes block d of its own slot, for rank d, and the signals are those of a barrier.) The epoch
counts the uses of a slot. A signal carries the epoch and the fingerprint of the call whose chunk is there (signals.py).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from ..cache import BoundedCache
from ..gpu.launch import LaunchCache
from ..kernels.signal_words import FIRST_COUNTERS, MAX_CHUNKS
from ..schedule.order import Topology, Transfer, Transfers, targets
from .copy_engine import Route
from .signals import Tag

if TYPE_CHECKING:
    from .waits import BoundedWaits

SLOTS = 3  # what two operators in a row use: two calls and one (workspace.py)
BARRIER = SLOTS  # one slot more, for signals only
_ALIGN = 4096
_MOST_CALLS = 256  # kinds of calls that a slot remembers
_PLANS_OF_A_CALL = 8  # gathers of one shape: forwards, input gradients, and what is gathered again


@dataclass(frozen=True)
class Layout:
    """Where things lie in the heap: signals of all slots, then their blocks, then their flagged words (kernels/flagged_words.py).
    These have memory of their own because blocks are any bytes, and so could look like a flag. Sizes are those of one slot."""

    world_size: int
    slot_bytes: int
    flagged_bytes: int = 0

    @property
    def signals_bytes(self) -> int:
        """Of a slot's W x MAX_CHUNKS signals."""
        return self.world_size * MAX_CHUNKS * 8

    @property
    def bytes_of_slot(self) -> int:
        """Of blocks and flagged words together."""
        return self.slot_bytes + self.flagged_bytes

    @property
    def block_bytes(self) -> int:
        """Of one block of a slot."""
        return self.slot_bytes // self.world_size

    @cached_property
    def _starts(self) -> tuple[int, int, int, int]:
        """(first slot's blocks, its flagged words, one slot's blocks to the next, one's words to the next), in bytes."""
        sizes = ((BARRIER + 1) * self.signals_bytes, self.slot_bytes, self.flagged_bytes)
        blocks, pitch, words = [-(-nbytes // _ALIGN) * _ALIGN for nbytes in sizes]
        return blocks, blocks + SLOTS * pitch, pitch, words

    @cached_property
    def nbytes(self) -> int:
        """Of the heap."""
        return self._starts[1] + SLOTS * self._starts[3]

    def offset(self, slot: int) -> int:
        """Byte offset of a slot's blocks. The barrier has none."""
        return self._starts[0] + slot * self._starts[2]

    def flagged_offset(self, slot: int) -> int:
        """Byte offset of a slot's flagged words. The barrier has none."""
        return self._starts[1] + slot * self._starts[3]

    def covering(self, slot_bytes: int, flagged_bytes: int = 0) -> Layout:
        """The smallest layout that holds both this one and slots of the given sizes."""
        return Layout(self.world_size, max(self.slot_bytes, slot_bytes), max(self.flagged_bytes, flagged_bytes))


def with_room(slot_bytes: int) -> int:
    """slot_bytes, rounded up to eight steps between powers of two: so many times at most the heap grows until rows are twice as
    many. Up to an eighth more memory; none for 1 to 16 times a power of two, as most models have it."""
    step = 1 << max(0, (slot_bytes - 1).bit_length() - 4)
    return -(-slot_bytes // step) * step


class Counters:
    """What the kernels of one product count, int64 words on the device, in the order of kernels/signal_words.py."""

    def __init__(self, words: torch.Tensor) -> None:
        self.left = words[:1]  # CTAs that have exited
        self.claimed = words[1:2]  # tiles that a CTA has taken
        self.sent = words[2:3]  # pieces of the own rows that a CTA has taken to store them at the peers
        self.here = words[3:4]  # chunks that may be multiplied, in their order (kernels/arrivals.py)
        self.complete = words[FIRST_COUNTERS:]  # stored tiles, or pieces, by destination and chunk


class Slot:
    """One slot as this rank sees it, and as it sees the peers'. views: of every rank's heap."""

    def __init__(self, views: list[torch.Tensor], layout: Layout, index: int, rank: int, device: torch.device) -> None:
        world, has_blocks = layout.world_size, index != BARRIER
        start, size = layout.offset(index), layout.slot_bytes * has_blocks
        self.memory = [view[start : start + size] for view in views]
        start, size = index * layout.signals_bytes, layout.signals_bytes
        signals = [view[start : start + size].view(torch.int64).view(world, MAX_CHUNKS) for view in views]
        self.signals = signals[rank]  # int64 [W, MAX_CHUNKS], row s written by rank s
        self.outgoing = [words[rank] for words in signals]  # the row that this rank writes at each peer
        start, size = layout.flagged_offset(index), layout.flagged_bytes * has_blocks
        flagged = [view[start : start + size].view(torch.int64) for view in views]
        self.flagged = flagged[rank]  # int64, in W blocks as large as the call wants them, block s written by rank s
        # int64 [W] each, for kernels that signal, or store at, peers themselves
        addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in (self.outgoing, self.memory, flagged)]
        self.outgoing_at, self.memory_at, self.flagged_at = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._count(world, device)

    def _count(self, world: int, device: torch.device) -> None:
        """Make what this rank alone counts."""
        count = FIRST_COUNTERS + world * MAX_CHUNKS
        self.control = torch.zeros(1 + count, dtype=torch.int64, device=device)
        self.epoch = self.control[:1]  # as a signal has it; on the device, where a replayed graph goes on counting
        self.counted = self.control[1:]
        self.counters = Counters(self.counted)  # reset when the epoch advances
        # of kernels that send everything themselves: at their end they reset these, and advance the epoch that no copy sends
        self.direct_counters = Counters(torch.zeros(count, dtype=torch.int64, device=device))
        self.calls: BoundedCache[Hashable, Call] = BoundedCache(_MOST_CALLS)


class Call:
    """One kind of use of one slot: blocks [W, *block shape] of one dtype, each sent in `chunks` equal parts.

    Everything here holds for every call of that kind, of whatever linear, but `tag`: the call that uses the slot now. How it
    waits is the domain's (waits.py). Every wait holds the caller's stream, on the CPU the caller, and has a time limit:

        next_epoch()                     advances the slot's epoch by `tag` and resets its counters, before copies send anything
        wait(first, count=1)             for the blocks of `count` ranks from rank `first` on; the own one counts as here
        wait_chunk(first, chunk, count=1)     the same for one chunk of each
        wait_for_all()                   for the blocks of all other ranks
        receive(own)                     copies own [block shape], contiguous, into this rank's block, and waits for all others
        take(y)                          copies the blocks of all others into y [W, *block shape], chunk by chunk as they come
        barrier()                        advances the epoch, signals every peer, and waits for the same from each
    """

    tag: Tag

    def __init__(self, waits: BoundedWaits, slot: Slot, shape: torch.Size, dtype: torch.dtype, chunks: int) -> None:
        self.slot, self.chunks = slot, chunks
        self.rank, self.world_size, self.abort = waits.rank, waits.world_size, waits.abort
        self._shape, self._dtype, self._block_size = shape, dtype, shape.numel()
        self.peers = targets(Topology(1, self.world_size, self.rank))
        self._launcher, pieces = waits.launcher, self.world_size * chunks
        # A plan has one entry for what it sends, and across nodes one for each chunk that it passes on.
        self._routes: BoundedCache[Hashable, list[Route]] = BoundedCache(_MOST_CALLS + _PLANS_OF_A_CALL * pieces)
        self._whole = dict[int, tuple[torch.Tensor, Route]]()  # by peer
        self.next_epoch = partial(waits.next_epoch, self)
        self.wait, self.wait_chunk = partial(waits.wait, self), partial(waits.wait_chunk, self)
        self.wait_for_all = partial(waits.wait, self, 0, self.world_size)
        self.receive, self.barrier = partial(waits.receive, self), partial(waits.barrier, self)
        self.take = partial(waits.take, self)

    @cached_property
    def launches(self) -> LaunchCache:
        """Its kernels' launches."""
        return LaunchCache(self._launcher, self.world_size * self.chunks)

    @cached_property
    def blocks(self) -> torch.Tensor:
        """The blocks [W, *block shape] of this rank's own slot; a call whose data come as flagged words has none."""
        return self._blocks(self.slot.memory[self.rank])

    @torch.inference_mode(False)  # a view of an inference tensor is one, which later calls could not write
    def _blocks(self, memory: torch.Tensor) -> torch.Tensor:
        count = self.world_size * self._shape.numel()
        return memory[: count * self._dtype.itemsize].view(self._dtype).view(self.world_size, *self._shape)

    @cached_property
    @torch.inference_mode(False)
    def gathered(self) -> torch.Tensor:
        """The blocks of a gather [M/W, K], one below the other: [M, K]."""
        return self.blocks.flatten(0, 1)

    def chunk_of(self, block: int, chunk: int) -> torch.Tensor:
        """One chunk [rows / chunks, ...] of a block of the own slot."""
        return self.blocks[block].chunk(self.chunks)[chunk]

    def remote_block(self, peer: int) -> torch.Tensor:
        """This rank's block [block shape] in the slot of `peer`: where it is sent; or, where blocks are pulled, what `peer` has
        left for it."""
        return self._blocks(self.slot.memory[peer])[self.rank]

    @cached_property
    @torch.inference_mode(False)
    def incoming(self) -> list[torch.Tensor]:
        """The blocks for this rank that each of `peers` has left in its own slot, [block shape] each."""
        return [self.remote_block(peer) for peer in self.peers]

    def routes(self, transfers: Transfers, tiles: int = 0, pitch: int = 0) -> list[Route]:
        """The copy engine's way for each transfer of a schedule. tiles: what the counter of stored tiles, or strips, reaches
        when a chunk is complete, for transfers that leave after them. pitch: elements from one block of the source to the next;
        0: they lie one after the other."""
        pitch = pitch or self._block_size
        key = (transfers, tiles, pitch)
        return self._routes.get(key) or self._routes.put(
            key, [self._route(transfer, tiles, pitch) for transfer in transfers]
        )

    def _route(self, transfer: Transfer, tiles: int, pitch: int) -> Route:
        word = transfer.target * MAX_CHUNKS + transfer.chunk
        after = (self.slot.counters.complete[word : word + 1], tiles) if transfer.after_tiles else None
        return self._route_to(transfer.target, transfer.chunk, transfer.block * pitch, after)

    def _route_to(self, peer: int, chunk: int, first: int, after: tuple[torch.Tensor, int] | None) -> Route:
        """The way of a chunk of a block, which begins at element `first` of the source."""
        target, signal = self.remote_block(peer).chunk(self.chunks)[chunk], self.slot.outgoing[peer][chunk : chunk + 1]
        return Route(first + chunk * target.numel(), target, signal, self.slot.epoch, after)

    def routes_of_sums(self, scatter: Call, count: int) -> list[Route]:
        """The copy engine's ways of this rank's block to the peers, chunk by chunk, each when `scatter` has counted so much
        of the own one."""
        counted = scatter.slot.counters.complete[self.rank * MAX_CHUNKS :]
        return self._routes.get(key := (scatter.slot, count)) or self._routes.put(
            key, [
                self._route_to(peer, chunk, 0, (counted[chunk : chunk + 1], count))
                for chunk in range(self.chunks) for peer in self.peers
            ],
        )  # fmt: skip

    def route(self, target: int, count: int) -> Route:
        """The copy engine's way of a source of `count` elements to the start of this rank's block at a peer: of calls whose
        blocks are as long as they happen to be. One object for each peer: of one push at a time."""
        if target not in self._whole:
            block = self.remote_block(target).view(-1)
            self._whole[target] = block, Route(0, block, self.slot.outgoing[target][:1], self.slot.epoch, None)
        block, route = self._whole[target]
        route.target, route.nbytes.value = block[:count], count * block.itemsize
        return route

    @cached_property
    @torch.inference_mode(False)
    def own_block(self) -> torch.Tensor:
        """This rank's block [block shape] of its own slot."""
        return self.blocks[self.rank]

    def keep(self, own: torch.Tensor) -> None:
        """Copy own [block shape], contiguous, into this rank's block."""
        self.own_block.copy_(own)
