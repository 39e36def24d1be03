"""Which call a signal belongs to: its fingerprint, and how it shares an int64 with the epoch.

    word = epoch << 32 | fingerprint        kernels/signal.py has the same on the device

A peer that skipped a call, swapped two or has another length sends another fingerprint. The wait sees that and names both calls.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property

from ..kernels.signal_words import EPOCH_SHIFT

_EPOCH = 1 << EPOCH_SHIFT
_WORD = 1 << 64


@dataclass(frozen=True)
class Tag:
    """One call as ranks tell it from others.

    op: the linear's name and its pass, "decoder.layers.0.mlp.linear_fc1/fprop". what: operator, shapes and dtype, in words.
    """

    op: str
    what: str

    @cached_property
    def fingerprint(self) -> int:
        return zlib.crc32(f"{self.op}|{self.what}".encode())

    @cached_property
    def word(self) -> int:
        """One epoch plus the fingerprint: what the slot's epoch grows by."""
        return _EPOCH + self.fingerprint

    @cached_property
    def barrier(self) -> Tag:
        """The tag of the barrier before this call."""
        return Tag(f"{self.op}/barrier", "barrier")

    def __str__(self) -> str:
        return f"{self.op} [{self.what}]"


def next_word(word: int, tag: Tag) -> int:
    """The signal of a slot's next call, as a signed int64."""
    return _signed((epoch_of(word) << EPOCH_SHIFT) + tag.word)


def epoch_of(word: int) -> int:
    return word >> EPOCH_SHIFT


def fingerprint_of(word: int) -> int:
    return word & (_EPOCH - 1)


def has_arrived(seen: int, expected: int) -> bool:
    """Whether a signal is of the expected epoch or a later one, also where the epoch has wrapped around in between."""
    return _signed(seen - (epoch_of(expected) << EPOCH_SHIFT)) >= 0


def is_same_call(seen: int, expected: int) -> bool:
    """Whether a signal that has arrived is of the same call. A later epoch is: a peer may be one barrier ahead."""
    return seen == expected or epoch_of(seen) != epoch_of(expected)


def _signed(number: int) -> int:
    return (number + _WORD // 2) % _WORD - _WORD // 2
