"""The time in a simulation: what happens next, in order, and what has happened."""

from __future__ import annotations

import heapq

from .hardware_queue import Action
from .timeline import Span, Token


class Clock:
    """One for all ranks. spans, tiles, tokens: as a Timeline's."""

    def __init__(self) -> None:
        self.now = 0.0
        self.spans: list[Span] = []
        self.tiles: list[Span] = []
        self.tokens: list[tuple[int, Token, float]] = []
        self._events: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, time: float, action: Action) -> None:
        """Let `action` happen then."""
        self._count += 1  # of two events at one time the one that was planned first happens first
        heapq.heappush(self._events, (time, self._count, action))

    def run(self) -> None:
        """Let everything happen, and what follows from it."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
