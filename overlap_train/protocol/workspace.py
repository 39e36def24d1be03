"""The slots of a domain: the state that outlives a call."""

from __future__ import annotations

import torch

from ..symmetric import SymmetricHeap
from .layout import BARRIER, SLOTS, Layout
from .slot import Call, Slot
from .slot_use import SlotUse
from .tags import Tag, epoch_of
from .waits import BoundedWaits


class Workspace:
    """Three slots, which gathers and scatters alike take as they get free, and a barrier for when they do not."""

    _last: Call  # that was opened

    def __init__(self, heap: SymmetricHeap, layout: Layout, device: torch.device, waits: BoundedWaits) -> None:
        self._waits = waits
        self.slots = [self._slot(heap, layout, index, device) for index in range(SLOTS)]
        self._barrier = self._slot(heap, layout, BARRIER, device)
        self.use = SlotUse()

    def _slot(self, heap: SymmetricHeap, layout: Layout, index: int, device: torch.device) -> Slot:
        return Slot(heap, layout, index, self._waits.rank, device)

    def _new_call(self, slot: Slot, block_shape: torch.Size, dtype: torch.dtype, chunks: int) -> Call:
        return Call(self._waits, slot, block_shape, dtype, chunks)

    def begin(self, tag: Tag, calls: int, barrier_first: bool) -> None:
        """Start an operator that opens up to so many calls: afterwards there are slots for them.

        One that has begun ahead goes on: it has its slot.
        """
        goes_on = self.use.is_ahead
        self.use.begin()
        if not goes_on and (barrier_first or len(self.use.free()) < calls):
            self.barrier(self._after_error(tag) if self.use.has_raised else tag.barrier)

    def _after_error(self, tag: Tag) -> Tag:
        """The tag of the barrier after an operator that raised. It says how often each slot was used.

        One rank may have raised before it used its slot, and a peer after that. Then later waits on this slot would take the
        blocks of an earlier call for their own, or wait for a use that never comes. On a GPU the host waits here for what it has
        enqueued: only the device knows its epochs. A capture forbids that."""
        if self._waits.launcher is not None and torch.cuda.is_current_stream_capturing():
            return tag.barrier
        uses = ", ".join(str(epoch_of(int(slot.epoch))) for slot in self.slots)
        return Tag(f"{tag.op}/barrier", f"barrier after an error, slots used {uses} times")

    def begin_ahead(self) -> None:
        """Start the next operator, of one call, before the last call of this one is waited for."""
        if not self.use.free():
            self._last.wait_for_start()
            self.use.receive()
        self.use.begin_ahead()

    def open(self, block_shape: torch.Size, dtype: torch.dtype, tag: Tag, chunks: int = 1) -> Call:
        """Start a call on a free slot."""
        self._last = self._call(self.slots[self.use.take()], block_shape, dtype, tag, chunks)
        return self._last

    def barrier(self, tag: Tag) -> None:
        """Hold the caller's stream until every rank has come here: what they enqueued before is done, every slot is free."""
        try:
            self._call(self._barrier, torch.Size([0]), torch.int64, tag, 1).barrier()
        except BaseException:
            self.use.invalidate()
            raise
        self.use.clear()

    def _call(self, slot: Slot, block_shape: torch.Size, dtype: torch.dtype, tag: Tag, chunks: int) -> Call:
        self._waits.know(tag)
        key = (block_shape, dtype, chunks)
        call = slot.calls.get(key) or slot.calls.put(key, self._new_call(slot, block_shape, dtype, chunks))
        call.tag = tag
        return call
