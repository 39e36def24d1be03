"""A dictionary that remembers a bounded number of things."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BoundedCache(Generic[Key, Value]):
    """The `least` values that were used last, and at most as many others.

    What is used is kept among the recent. When there are `least` of them, they become the old ones, and what was old and has not
    been used meanwhile is forgotten. So a look-up hashes its key once, where an exact order of use would take that twice: every
    call makes several, of 0.2 microseconds.
    """

    __slots__ = ("_least", "_old", "_recent")

    def __init__(self, least: int) -> None:
        self._least = least
        self._recent: dict[Key, Value] = {}
        self._old: dict[Key, Value] = {}

    def __len__(self) -> int:
        return len(self._recent) + len(self._old)

    def __iter__(self) -> Iterator[Key]:
        yield from (*self._recent, *self._old)

    def get(self, key: Key) -> Value | None:
        """The value, which now counts as recent; None if there is none."""
        value = self._recent.get(key)
        if value is None and key in self._old:
            return self.put(key, self._old[key])
        return value

    def put(self, key: Key, value: Value) -> Value:
        """Remember a value, which is returned."""
        self._old.pop(key, None)
        if len(self._recent) >= self._least and key not in self._recent:
            self._old, self._recent = self._recent, {}
        self._recent[key] = value
        return value

    def clear(self) -> None:
        self._recent, self._old = {}, {}
