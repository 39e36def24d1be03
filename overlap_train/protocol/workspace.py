"""The slots of a domain: the state that outlives a call."""

from __future__ import annotations

import torch

from ..symmetric import SymmetricHeap
from .layout import BARRIER, SLOTS, Layout
from .slot import Call, Slot
from .slot_use import SlotUse
from .waits import BoundedWaits


class Workspace:
    """Three slots, which gathers and scatters alike take as they get free, and a barrier for when they do not."""

    def __init__(self, heap: SymmetricHeap, layout: Layout, device: torch.device, waits: BoundedWaits) -> None:
        self._waits = waits
        self.slots = [Slot(heap, layout, index, waits.rank, device) for index in range(SLOTS)]
        self._barrier = Slot(heap, layout, BARRIER, waits.rank, device)
        self.use = SlotUse()

    def begin(self, name: str, calls: int, in_step: bool) -> None:
        """Start an operator that opens up to so many calls: there are slots for them behind this. in_step: the ranks meet."""
        self.use.begin()
        if in_step or len(self.use.free()) < calls:
            self.barrier(f"{name}/begin")

    def open(self, block_shape: torch.Size, dtype: torch.dtype, op: str, chunks: int = 1) -> Call:
        """Start a call on a free slot. Its epoch is counted by who sends (`Slot.next_epoch`)."""
        return self._call(self.slots[self.use.take()], block_shape, dtype, op, chunks)

    def barrier(self, op: str) -> None:
        """Hold the caller's stream until every rank has come here: what they enqueued before is done, every slot is free."""
        self._call(self._barrier, torch.Size([0]), torch.int64, op, 1).meet()
        self.use.clear()

    def _call(self, slot: Slot, block_shape: torch.Size, dtype: torch.dtype, op: str, chunks: int) -> Call:
        key = (block_shape, dtype, op, chunks)
        call = slot.calls.get(key)
        if call is None:
            call = slot.calls[key] = Call(self._waits, slot, block_shape, dtype, op, chunks)
        return call
