"""Where things lie in the symmetric heap."""

from __future__ import annotations

from dataclasses import dataclass

from .kernels.signal_words import MAX_CHUNKS

SLOTS = 2  # of each channel
_ALIGN = 4096


@dataclass(frozen=True)
class Layout:
    """Where things lie in the heap: signals of both channels, then the gather slots, then the scatter slots. Sizes in bytes."""

    world_size: int
    gather_slot: int
    scatter_slot: int

    @property
    def nbytes(self) -> int:
        return self.offset("scatter", SLOTS)

    def offset(self, channel: str, slot: int) -> int:
        """Byte offset of a slot's blocks."""
        if channel == "gather":
            return _aligned(2 * SLOTS * self.signals_bytes) + slot * _aligned(self.gather_slot)
        return self.offset("gather", SLOTS) + slot * _aligned(self.scatter_slot)

    def signals_offset(self, channel: str, slot: int) -> int:
        """Byte offset of a slot's W x MAX_CHUNKS signals."""
        return ((channel == "scatter") * SLOTS + slot) * self.signals_bytes

    @property
    def signals_bytes(self) -> int:
        return self.world_size * MAX_CHUNKS * 8

    def slot_bytes(self, channel: str) -> int:
        return self.gather_slot if channel == "gather" else self.scatter_slot

    def covering(self, gather_slot: int, scatter_slot: int) -> Layout:
        """The smallest layout that holds both this one and slots of the given sizes."""
        return Layout(self.world_size, max(self.gather_slot, gather_slot), max(self.scatter_slot, scatter_slot))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
