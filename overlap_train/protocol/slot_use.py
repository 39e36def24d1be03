"""Which slots are free: each rank works it out for itself, from the calls that all ranks make alike.

Operators are numbered. Whoever has received the blocks of operator n from every peer knows that every peer is done with operator
n - 1: a peer sends blocks of n only after finishing n - 1. In operator n + 1 the slots of n - 1 and before are free.

    two calls an operator, as in a column linear's backward, then one      three slots suffice: all that a dense GPT does
    two calls, then two again                                              a barrier in between (workspace.py)

An operator may begin ahead: it sends its blocks before what the running one receives is read. So a peer that has sent blocks of n
ahead has read those of n - 2, but perhaps not of n - 1. Before a rank sends n + 1, it waits for the first block of n from every
peer. Then the slot of n - 2 is free. Three slots suffice: n + 1 is sent, n is about to be read, a peer may still read n - 1.
"""

from __future__ import annotations

from .layout import SLOTS

_LONG_AGO = -2


class SlotUse:
    """The number of the operator that runs, or was begun ahead, and of the last that used each slot.

    _sent_after: the last operator that each rank was done with when it sent for that one. _free: the slots of those that, as this
    rank knows, all are done with. has_raised: an operator has, and ranks have not met since.
    """

    def __init__(self) -> None:
        self._operator = 0
        self._sent_after = _LONG_AGO
        self.clear()
        self.is_ahead = False  # the next operator has begun

    def begin(self) -> None:
        """Count another operator. One that took no slot is not counted: nothing was received in it."""
        if not self.is_ahead and self._operator in self._last_used:
            self.receive()
            self._sent_after = self._operator
            self._operator += 1
        self.is_ahead = False

    def begin_ahead(self) -> None:
        """Count another operator, before anything that the one that runs has received is read."""
        self._sent_after = self._operator - 1
        self._operator += 1
        self.is_ahead = True

    def receive(self) -> None:
        """Blocks of the operator that runs have come from every peer."""
        self._free = [slot for slot, user in enumerate(self._last_used) if user <= self._sent_after]

    def free(self) -> list[int]:
        """The slots that, as this rank knows, no rank reads any more."""
        return self._free

    def take(self) -> int:
        """The first free slot, for a call of this operator: the same slots again and again, as far as that goes."""
        slot, *self._free = self.free()
        self._last_used[slot] = self._operator
        return slot

    def clear(self) -> None:
        """All ranks have met: every slot is free."""
        self._last_used, self._free = [_LONG_AGO] * SLOTS, list(range(SLOTS))
        self.has_raised = False

    def invalidate(self) -> None:
        """The operator has raised, perhaps before it had received anything: no slot is known to be free before ranks meet."""
        self._last_used, self._free = [self._operator] * SLOTS, []
        self.is_ahead = False
        self.has_raised = True
