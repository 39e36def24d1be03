"""What the scheduler knows about one greenlet, and how a schedule can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from greenlet import greenlet

from tests.protocol.interpreter_hooks import MemoryAccess, read_word

SAME_WORD_READS = 3  # plain loads of one unchanged word, with no other progress between, that count as polling


class ScheduleError(AssertionError):
    """A schedule failed. The message starts with the seed that replays it."""


class Deadlock(ScheduleError):
    """No actor can move: all that are left poll for something that nobody will write."""


class StepLimit(ScheduleError):
    """The schedule did not end within the step limit."""


@dataclass
class Word:
    """One word, or words that are polled together, that an actor has read since it last made progress."""

    addresses: tuple[int, ...]
    size: int
    value: tuple[int, ...]
    reads: int

    def unchanged(self) -> bool:
        return _read(self.addresses, self.size) == self.value

    def __str__(self) -> str:
        return str(self.value[0]) if len(self.value) == 1 else f"{len(self.value)} words"


def _read(addresses: tuple[int, ...], size: int) -> tuple[int, ...]:
    return tuple(read_word(address, size) for address in addresses)


@dataclass(eq=False)
class Launch:
    """One kernel launch of one rank: CTAs that have not started yet, and how many are live."""

    waiting: list[Actor]
    live: int = 0


@dataclass(eq=False)
class Actor:
    """One greenlet: a CTA (then `program` holds its program ids and the grid) or a Python function.

    parked: nothing to do before something changes; see `blocked`.
    """

    name: str
    rank: int
    body: Callable[[], object]
    program: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    launch: Launch | None = None
    greenlet: greenlet | None = None
    parked: bool = False
    waits_for: str = ""
    # of CTAs
    words: dict[int, Word] = field(default_factory=dict)
    stored_since_barrier: bool = False
    counted: object = None  # the memory order of its last count of a stored tile
    # of Python functions
    predicate: Callable[[], bool] | None = None
    polls_for: str = "something it polls through pause()"
    parked_at_version: int = -1

    def blocked(self, version: int) -> bool:
        """Whether it waits for a change that has not come. `version` counts the writes known so far."""
        if not self.parked:
            return False
        if self.predicate is not None:
            return not self.predicate()
        if self.program is not None:
            return all(word.unchanged() for word in self.words.values())
        return self.parked_at_version == version

    def is_polling(self, access: MemoryAccess) -> bool:
        """Whether a CTA that is about to make this access has only been reading the same words again."""
        word = self.words.get(access.address) if access.reads_only else None
        return word is not None and word.reads >= (1 if access.is_poll else SAME_WORD_READS)

    def note(self, access: MemoryAccess) -> None:
        """Keep the words that a CTA may be polling; a write, or a block that was read, ends the polling."""
        addresses = (access.address,) if access.is_word else access.polled
        if not access.reads_only or not addresses:
            self.words.clear()
            return
        value, word = _read(addresses, access.size), self.words.get(access.address)
        reads = word.reads + 1 if word is not None and word.value == value else 1
        self.words[access.address] = Word(addresses, access.size, value, reads)
