"""A dictionary that remembers a bounded number of things."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BoundedCache(dict[Key, Value]):
    """A dictionary of at most `most` entries: a new one takes the place of the oldest. A look-up is dict's own, in C."""

    def __init__(self, most: int = 4096) -> None:
        super().__init__()
        self.most = most

    def put(self, key: Key, value: Value) -> Value:
        """Remember a value, which is returned."""
        if len(self) >= self.most and key not in self:
            self.pop(next(iter(self)), None)
        self[key] = value
        return value
