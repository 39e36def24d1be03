"""The slots of a domain, and which are free: each rank works it out for itself, from the calls that all ranks make alike.

Operators are numbered. Whoever has received the blocks of operator n from every peer knows that every peer is done with
operator n - 1: a peer sends blocks of n only after finishing n - 1. In operator n + 1 the slots of n - 1 and before are free.
So three slots suffice for two calls an operator, as in a column linear's backward, then one: all that a dense GPT does. Between
two operators of two calls each there is a barrier. A call may send what follows from all blocks of the call before it in the same
operator. Then that one frees the slots of earlier operators, and this one says that peers have read that one: they count as one.

An operator may begin ahead: it sends its blocks before what the running one receives is read. So a peer that has sent blocks of n
ahead has read those of n - 2, but perhaps not of n - 1. Before a rank sends n + 1, it waits for the first block of n from every
peer. Then the slot of n - 2 is free. Three slots suffice: n + 1 is sent, n is about to be read, a peer may still read n - 1.
"""

from __future__ import annotations

import torch

from ..symmetric import SymmetricHeap
from .signals import Tag, epoch_of
from .slots import BARRIER, SLOTS, Call, Layout, Slot
from .waits import BoundedWaits

_LONG_AGO = -2


class SlotUse:
    """The number of the operator that runs, or was begun ahead, and of the last that used each slot.

    _sent_after: the last operator that each rank was done with when it sent for that one. free: the slots that, as this rank
    knows, no rank reads any more. has_raised: an operator has, and ranks have not met since.
    """

    def __init__(self) -> None:
        self._operator = 0
        self._sent_after = _LONG_AGO
        self.clear()
        self.is_ahead = False  # the next operator has begun

    def begin(self) -> None:
        """Count another operator. One that took no slot is not counted: nothing was received in it."""
        last_used, operator, sent_after = self._last_used, self._operator, self._sent_after
        if operator in last_used:
            self.free = [slot for slot, user in enumerate(last_used) if user <= sent_after]
            self._sent_after = operator
            self._operator = operator + 1

    def begin_ahead(self) -> None:
        """Count another operator, before anything that the one that runs has received is read."""
        self._sent_after = self._operator - 1
        self._operator += 1
        self.is_ahead = True

    def receive(self) -> None:
        """Blocks of the operator that runs have come from every peer."""
        self.free = [slot for slot, user in enumerate(self._last_used) if user <= self._sent_after]

    def receive_first(self, slot: int) -> None:
        """As receive, where a call follows from the one that took `slot`: when that has come, too, its readers are done."""
        self.receive()
        self._last_used[slot] = self._sent_after

    def take(self) -> int:
        """The first free slot, for a call of this operator: the same slots again and again, as far as that goes."""
        slot = self.free.pop(0)
        self._last_used[slot] = self._operator
        return slot

    def clear(self) -> None:
        """All ranks have met: every slot is free."""
        self._last_used, self.free = [_LONG_AGO] * SLOTS, list(range(SLOTS))
        self.has_raised = False

    def invalidate(self) -> None:
        """The operator has raised, perhaps before it had received anything: no slot is known to be free before ranks meet."""
        self._last_used, self.free = [self._operator] * SLOTS, []
        self.is_ahead = False
        self.has_raised = True


class Workspace:
    """Three slots, which gathers and scatters alike take as they get free, and a barrier for when they do not."""

    _last: Call  # that was opened

    def __init__(self, heap: SymmetricHeap, layout: Layout, device: torch.device, waits: BoundedWaits) -> None:
        self._waits = waits
        *self.slots, barrier = self._new_slots(heap, layout, device)
        self._barrier_call = self._new_call(barrier, torch.Size([0]), torch.int64, 1)
        self.use = SlotUse()

    def _new_slots(self, heap: SymmetricHeap, layout: Layout, device: torch.device) -> list[Slot]:
        """SLOTS of them, and that of the barrier."""
        views = [heap.view(peer) for peer in range(layout.world_size)]
        return [Slot(views, layout, index, self._waits.rank, device) for index in range(BARRIER + 1)]

    def _new_call(self, slot: Slot, block_shape: torch.Size, dtype: torch.dtype, chunks: int) -> Call:
        return Call(self._waits, slot, block_shape, dtype, chunks)

    def begin(self, tag: Tag, calls: int, barrier_first: bool) -> None:
        """Start an operator. Afterwards so many slots are free; what it opens after `receive_first` finds its own. One that has
        begun ahead goes on."""
        use = self.use
        if use.is_ahead:
            use.is_ahead = False
            return
        use.begin()
        if barrier_first or len(use.free) < calls:
            self.barrier(self._after_error(tag) if use.has_raised else tag.barrier)

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
        if not self.use.free:
            self._last.wait_chunk(0, 0, self._last.world_size)  # then every rank has done what comes before it
            self.use.receive()
        self.use.begin_ahead()

    def receive_first(self) -> None:
        """What the call that was opened last receives has come from every peer, and what this rank sends next follows from it:
        once that has come from every peer, the slot is free, in this operator or the next."""
        self.use.receive_first(self.slots.index(self._last.slot))

    def open(self, block_shape: torch.Size, dtype: torch.dtype, tag: Tag, chunks: int = 1) -> Call:
        """Start a call on a free slot."""
        slot, key = self.slots[self.use.take()], (block_shape, dtype, chunks)
        self._last = call = slot.calls.get(key) or slot.calls.put(key, self._new_call(slot, *key))
        call.tag = tag
        return call

    def barrier(self, tag: Tag) -> None:
        """Hold the caller's stream until every rank has come here: what they enqueued before is done, every slot is free."""
        self._waits.register(tag)
        self._barrier_call.tag = tag
        try:
            self._barrier_call.barrier()
        except BaseException:
            self.use.invalidate()
            raise
        self.use.clear()
