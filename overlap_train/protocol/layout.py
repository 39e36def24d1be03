"""Where things lie in the symmetric heap."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.signal_words import MAX_CHUNKS

SLOTS = 3  # what two operators in a row use: two calls and one (slot_use.py)
BARRIER = SLOTS  # one slot more, for signals only
_ALIGN = 4096


@dataclass(frozen=True)
class Layout:
    """Where things lie in the heap: signals of all slots, then their blocks, then their flagged words.

    slot_bytes: of the blocks of one slot. flagged_bytes: of its flagged words (kernels/flagged_words.py), which have memory of
    their own because blocks are any bytes, and so could look like a flag.
    """

    world_size: int
    slot_bytes: int
    flagged_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.flagged_offset(BARRIER)

    @property
    def block_bytes(self) -> int:
        """Of one block of a slot."""
        return self.slot_bytes // self.world_size

    def offset(self, slot: int) -> int:
        """Byte offset of a slot's blocks."""
        return _aligned((BARRIER + 1) * self.signals_bytes) + slot * _aligned(self.slot_bytes)

    def size(self, slot: int) -> int:
        """Bytes of a slot's blocks; the barrier has none."""
        return 0 if slot == BARRIER else self.slot_bytes

    def flagged_offset(self, slot: int) -> int:
        """Byte offset of a slot's flagged words."""
        return self.offset(BARRIER) + slot * _aligned(self.flagged_bytes)

    def flagged_size(self, slot: int) -> int:
        """Bytes of a slot's flagged words; the barrier has none."""
        return 0 if slot == BARRIER else self.flagged_bytes

    def signals_offset(self, slot: int) -> int:
        """Byte offset of a slot's W x MAX_CHUNKS signals."""
        return slot * self.signals_bytes

    @property
    def signals_bytes(self) -> int:
        return self.world_size * MAX_CHUNKS * 8

    def covering(self, slot_bytes: int, flagged_bytes: int = 0) -> Layout:
        """The smallest layout that holds both this one and slots of the given sizes."""
        return Layout(self.world_size, max(self.slot_bytes, slot_bytes), max(self.flagged_bytes, flagged_bytes))


def with_room(slot_bytes: int) -> int:
    """slot_bytes, rounded up to eight steps between powers of two: so many times at most the heap grows until rows are twice as
    many, whatever lengths come. Up to an eighth more memory; none for 1 to 16 times a power of two, as most models have it."""
    step = 1 << max(0, (slot_bytes - 1).bit_length() - 4)
    return -(-slot_bytes // step) * step


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
