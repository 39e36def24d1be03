"""Slots, signals and epochs: the state that outlives a call.

A channel is one kind of traffic (gather or scatter) with two slots that its calls alternate between. A slot is W blocks
in symmetric memory, block s written by rank s alone, in one or more chunks of rows, with one signal a chunk. The epoch
counts the uses of a slot; a signal carries the epoch of the chunk that is there. With two slots no barrier is needed
before a slot is rewritten: whoever has received the blocks of one call from every peer knows that every peer is done
with the call before (docs/design.md, rule 3).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

import torch

from .copy_engine import CopyEngine, Route, StreamCopyEngine
from .kernels.signal_words import MAX_CHUNKS
from .layout import SLOTS, Layout
from .packed_launch import Launch, LaunchCache
from .symmetric import SymmetricHeap
from .watchdog import FaultRecord, Waiting, poll


def _addresses(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=device)


class Slot:
    """One slot as this rank sees it, and as it sees the peers'."""

    def __init__(
        self, heap: SymmetricHeap, layout: Layout, channel: str, index: int, rank: int, device: torch.device
    ) -> None:
        start, words = layout.offset(channel, index), layout.signals_offset(channel, index)
        size, world = layout.slot_bytes(channel), layout.world_size
        views = [heap.view(peer) for peer in range(world)]
        self.memory = [view[start : start + size] for view in views]
        signals = [
            view[words : words + layout.signals_bytes].view(torch.int64).view(world, MAX_CHUNKS) for view in views
        ]
        self.signals = signals[rank]  # int64 [W, MAX_CHUNKS], row s written by rank s
        self.outgoing = [words[rank] for words in signals]  # the row that this rank writes at each peer
        self.outgoing_at = _addresses(self.outgoing, device)  # int64 [W], for kernels that signal peers themselves
        self.memory_at = _addresses(self.memory, device)  # int64 [W], for kernels that store at peers themselves
        self.expected = 0  # the host's mirror of the epoch, for waits on the host and for messages
        self.control = torch.zeros(2 + world * MAX_CHUNKS, dtype=torch.int64, device=device)
        self.epoch = self.control[:1]  # on the device, so that a replayed graph counts on
        self.claimed = self.control[1:2]  # tiles taken by some CTA
        self.complete = self.control[2:]  # tiles written, by destination and chunk
        self._increment = torch.zeros_like(self.control)
        self._increment[0] = 1
        self._keep = self._increment.clone()
        self.calls: dict[Hashable, Call] = {}

    def next_epoch(self) -> None:
        """Epoch + 1, all counters 0; in one kernel, because each costs 5 microseconds of host time."""
        torch.addcmul(self._increment, self.control, self._keep, out=self.control)
        self.expected += 1


class Call:
    """One kind of use of one slot: blocks [W, *block shape] of one dtype, each sent in `chunks` equal parts, under one name.

    Everything here holds for every call of that kind, so that a call makes none of it.
    """

    def __init__(
        self, channel: Channel, slot: Slot, shape: torch.Size, dtype: torch.dtype, op: str, chunks: int
    ) -> None:  # fmt: skip
        self._channel = channel
        self.slot = slot
        self.op, self.chunks = op, chunks
        self.rank, self.world_size = channel.rank, channel.layout.world_size
        self._shape, self._dtype = shape, dtype
        self.blocks = self._blocks(slot.memory[self.rank])
        # all other ranks, nearest following first: the order in which blocks are pushed
        self.peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        # and nearest preceding first: the order in which their blocks arrive
        self.sources = [(self.rank - step) % self.world_size for step in range(1, self.world_size)]
        self.launches = LaunchCache(channel.driver)
        self._routes: dict[Hashable, list[Route]] = {}

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

    def knock(self) -> list[Route]:
        """To every peer: the signal of chunk 0 and no data; the source is the slot's epoch."""
        if "knock" not in self._routes:
            words = [self.slot.outgoing[other][:1] for other in self.peers]
            self._routes["knock"] = [Route(0, word, word, self.slot.epoch, None) for word in words]
        return self._routes["knock"]

    def _routes_to(self, peer: int, first: int, tiles: int | None) -> list[Route]:
        """A block's way to `peer`, chunk by chunk; it starts at element `first` of the source."""
        target = self.landing(peer)
        signals = self.slot.outgoing[peer].split(1)
        complete = self.slot.complete.split(1)[peer * MAX_CHUNKS :]
        size = target.numel() // self.chunks
        return [
            Route(first + i * size, place, signals[i], self.slot.epoch, None if tiles is None else (complete[i], tiles))
            for i, place in enumerate(target.chunk(self.chunks))
        ]

    def wait(self, source: int) -> None:
        """Hold the caller's stream (on the CPU: the caller) until the block of rank `source` is here."""
        self._channel.wait(self, source, 1)

    def wait_for_all(self) -> None:
        """Hold the caller's stream until the blocks of all other ranks are here."""
        self._channel.wait(self, 0, self.world_size)

    def waiting(self, source: int, chunk: int = 0) -> Waiting:
        return Waiting(self.op, self.rank, source, chunk, self._channel.timeout_s)


class Channel:
    """Two slots, used in turn."""

    def __init__(
        self, name: str, heap: SymmetricHeap, layout: Layout, rank: int, device: torch.device,
        engine: CopyEngine, fault: FaultRecord, timeout_s: float,
    ) -> None:  # fmt: skip
        self.rank, self.layout, self.timeout_s, self.fault = rank, layout, timeout_s, fault
        self.driver = engine.driver if isinstance(engine, StreamCopyEngine) and device.type == "cuda" else None
        self._engine = engine
        self._slots = [Slot(heap, layout, name, index, rank, device) for index in range(SLOTS)]
        self.turn = 0  # the slot that the next call takes
        self.wait: Callable[[Call, int, int], None] = (
            self._wait_on_stream if device.type == "cuda" else self._wait_on_host
        )

    def open(self, block_shape: torch.Size, dtype: torch.dtype, op: str, chunks: int = 1) -> Call:
        """Start a call on the next slot."""
        slot = self._slots[self.turn]
        self.turn = (self.turn + 1) % SLOTS
        slot.next_epoch()
        key = (block_shape, dtype, op, chunks)
        call = slot.calls.get(key)
        if call is None:
            call = slot.calls[key] = Call(self, slot, block_shape, dtype, op, chunks)
        return call

    def barrier(self, op: str) -> None:
        """Hold the caller's stream until every rank has come here, and go on with the first slot.

        Whatever ranks have enqueued before is then done, so that any slot may be written, whoever used it last. That makes room
        for calls whose slots do not take turns with those before, as those of a replayed graph.
        """
        call = self.open(torch.Size([1]), torch.int64, op)
        self._engine.push(call.slot.epoch, call.knock())
        call.wait_for_all()
        self.turn = 0

    def _wait_on_host(self, call: Call, first: int, count: int) -> None:
        for source in range(first, first + count):
            for chunk in range(call.chunks) if source != self.rank else ():
                self._wait_for_word(call, source, chunk)

    def _wait_for_word(self, call: Call, source: int, chunk: int) -> None:
        word, expected = call.slot.signals[source, chunk], call.slot.expected
        if not poll(lambda: word.item() >= expected, self.timeout_s):
            self.fault.raise_timeout(call.waiting(source, chunk), expected, int(word))

    def _wait_on_stream(self, call: Call, first: int, count: int) -> None:
        call.launches.run(("wait", first, count), (), partial(self._wait_launch, call, first, count))

    def _wait_launch(self, call: Call, first: int, count: int) -> Launch:
        from .kernels.signal import wait_kernel

        victim = first if first != self.rank else (first + 1) % self.layout.world_size  # a block that will be read
        row = call.blocks[victim]
        arguments = dict(
            signals_ptr=call.slot.signals, epoch_ptr=call.slot.epoch, abort_ptr=self.fault.abort, record_ptr=self.fault.record,
            tag=self.fault.tag(call.waiting(self.rank)), limit=int(self.timeout_s * 1e9), rank=self.rank, first=first,
            count=count, row_ptr=row, row_size=row.shape[-1],
        )  # fmt: skip
        return Launch(wait_kernel, (1,), arguments, dict(CHUNKS=call.chunks, TIMED=True, BLOCK=1024, num_warps=1))
