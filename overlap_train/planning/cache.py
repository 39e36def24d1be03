"""A dictionary that remembers a bounded number of things."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BoundedCache(Generic[Key, Value]):
    """The `most` values that were used last; older ones are forgotten. Every call makes several look-ups, of 0.2 microseconds."""

    __slots__ = ("_find", "_most", "_use", "_values")

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._find, self._use = self._values.get, self._values.move_to_end

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> Value | None:
        """The value, which now counts as used last; None if there is none."""
        value = self._find(key)
        if value is not None:
            self._use(key)
        return value

    def put(self, key: Key, value: Value) -> Value:
        """Remember a value, which is returned."""
        self._values[key] = value
        self._use(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)
        return value

    def clear(self) -> None:
        self._values.clear()
