"""When the exchanges of one call start, and when a rank lets them arrive: few are under way at once.

Engines execute these steps (operators/crossings.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from .kinds import SCATTER
from .turns import exchanges_ahead

START, ARRIVE = "start", "arrive"
Step = tuple[str, int]  # START or ARRIVE, and the number of the exchange
_MOST = 2  # one crosses the network while the one before it is passed on


def most_in_flight(kind: str, exchanges: int) -> int:
    """How many of a call's exchanges may be under way. Of a scatter all: nothing is passed on, and nothing waits for what comes
    before the call's end."""
    return exchanges if kind == SCATTER else _MOST


class InFlight:
    """Exchanges 0 ... count - 1, in order, at most `most` of them under way: the oldest one arrives before another one starts.

    Each method gives the steps that are due then. A step counts as taken when the next one is asked for, so all are to be taken.
    """

    def __init__(self, count: int, most: int) -> None:
        self.count, self._most = count, most
        self.started = self._arrived = 0

    def start(self) -> Iterator[Step]:
        """Start the next one."""
        if self.started - self._arrived == self._most:
            yield from self._arrive_until(self._arrived + 1)
        yield START, self.started
        self.started += 1

    def start_until(self, count: int) -> Iterator[Step]:
        """Start the first `count`, or as many as there are."""
        while self.started < min(count, self.count):
            yield from self.start()

    def go_ahead(self, done: int, parts: int) -> Iterator[Step]:
        """Start those of an operand that may cross while `done` of `parts` equal parts of the product run."""
        return self.start_until(exchanges_ahead(self.count, done, parts))

    def bring(self, count: int) -> Iterator[Step]:
        """Let the first `count` arrive. One more is started before: what is owed goes before what is waited for."""
        assert count <= self.count, f"exchange {count} of {self.count}"
        yield from self.start_until(count + 1)
        yield from self._arrive_until(count)

    def bring_chunk(self, chunk: int, chunks: int) -> Iterator[Step]:
        """The same for a chunk from all ranks, of `chunks`."""
        return self.bring(self.count // chunks * (chunk + 1))

    def finish(self) -> Iterator[Step]:
        """Start what is left, and let all arrive."""
        yield from self.start_until(self.count)
        yield from self._arrive_until(self.count)

    def arrive(self) -> Iterator[Step]:
        """Let all arrive that have started."""
        return self._arrive_until(self.started)

    def _arrive_until(self, count: int) -> Iterator[Step]:
        while self._arrived < count:
            yield ARRIVE, self._arrived
            self._arrived += 1
