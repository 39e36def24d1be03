"""Which slots are free: each rank works it out for itself, from the calls that all ranks make alike.

Operators are numbered. Whoever has received the blocks of operator n from every peer knows that every peer is done with operator
n - 1: a peer sends blocks of n only after finishing n - 1. In operator n + 1 the slots of n - 1 and before are free.

    two calls an operator, as in a column linear's backward, then one      three slots suffice: all that a dense GPT does
    two calls, then two again                                              a barrier in between (workspace.py)
"""

from __future__ import annotations

from .layout import SLOTS

_LONG_AGO = -2


class SlotUse:
    """The number of the operator that runs, and of the last that used each slot."""

    def __init__(self) -> None:
        self._operator = 0
        self._last_used = [_LONG_AGO] * SLOTS

    def begin(self) -> None:
        """Another operator. One that took no slot is not counted: nothing was received in it."""
        if self._operator in self._last_used:
            self._operator += 1

    def free(self) -> list[int]:
        """The slots that, as this rank knows, no rank reads any more."""
        return [slot for slot, user in enumerate(self._last_used) if user < self._operator - 1]

    def take(self) -> int:
        """The first free slot, for a call of this operator: the same slots again and again, as far as that goes."""
        slot = self.free()[0]
        self._last_used[slot] = self._operator
        return slot

    def clear(self) -> None:
        """All ranks have met: every slot is free."""
        self._last_used = [_LONG_AGO] * SLOTS

    def invalidate(self) -> None:
        """The operator has raised, perhaps before it had received anything: no slot is known to be free before ranks meet."""
        self._last_used = [self._operator] * SLOTS
