"""In which order a rank enqueues kernels, exchanges with other nodes, and their arrivals, as operators/crossings.py has it.

With one hardware queue (hardware_queue.py) the order counts. What copy engines send inside a node stands in no such queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from ....planning.machines import System
from ....planning.schedule.crossings import Crossing
from ....planning.schedule.kinds import SCATTER
from ....planning.schedule.turns import EXCHANGE, exchanges_ahead
from .across_nodes import turns
from .timeline import Arrival, Kernel, Send, arrived, landed
from .work import Work

Item = Kernel | Send | Arrival
Part = tuple[list[Item], list[Send]]  # what is enqueued, in order; copies inside the node
_MOST = 2  # exchanges under way, as of operators/crossings.py


class Exchanges:
    """The exchanges of one call, in order. Each method says what is enqueued then."""

    def __init__(self, work: Work, sends: Sequence[Send]) -> None:
        arrivals = (_arrival(work, crossing) for crossing in work.plan.crossings)
        self._waiting = deque(zip(sends, arrivals, strict=True))
        self._under_way = deque[Arrival]()
        self._count = len(self._waiting)
        self._most = self._count if work.plan.kind == SCATTER else _MOST  # of a scatter nothing is passed on

    @property
    def are_left(self) -> bool:
        """Whether there are some that have not started."""
        return bool(self._waiting)

    @property
    def _started(self) -> int:
        return self._count - len(self._waiting)

    def start(self, *before: Kernel) -> Iterator[Item]:
        """The next one, after the sum that it sends, if there is one."""
        if len(self._under_way) == self._most:
            yield self._under_way.popleft()
        send, arrival = self._waiting.popleft()
        self._under_way.append(arrival)
        yield from before
        yield send

    def until(self, count: int) -> Iterator[Item]:
        while self._started < min(count, self._count):
            yield from self.start()

    def go_ahead(self, done: int, parts: int) -> Iterator[Item]:
        """Those of an operand that may cross while `done` of `parts` equal parts of its product run."""
        return self.until(exchanges_ahead(self._count, done, parts))

    def bring(self, count: int) -> Iterator[Item]:
        """What lets the first `count` arrive; one more is enqueued before."""
        yield from self.until(count + 1)
        while self._started - len(self._under_way) < count:
            yield self._under_way.popleft()

    def bring_chunk(self, chunk: int, chunks: int) -> Iterator[Item]:
        """The same for a chunk from all ranks."""
        return self.bring(self._count // chunks * (chunk + 1))

    def finish(self) -> Iterator[Item]:
        yield from self.until(self._count)
        while self._under_way:
            yield self._under_way.popleft()


def _arrival(work: Work, crossing: Crossing) -> Arrival:
    leg = crossing.received
    if crossing.lands:
        return Arrival(landed(work.call, leg.target, leg.fills, leg.chunk))
    return Arrival(arrived(work.call, leg.fills, leg.chunk))


def in_turns(
    work: Work, products: Sequence[Kernel], sums: Iterable[Kernel], own: Exchanges, earlier: Exchanges | None
) -> Iterator[Item]:
    """Products by the library of what leaves, each exchange after its products and its sum (ResultCrossings.enqueue). earlier:
    the exchanges of what is gathered again, if there are any."""
    sums, done = iter(sums), 0
    for what, units in turns(work):
        for _ in units:
            yield products[done]
            done += 1
            yield from earlier.go_ahead(done, len(products)) if earlier else ()
        if what == EXCHANGE:
            yield from own.start(*islice(sums, 1))
    yield from after_products(sums, own, earlier)


def after_products(sums: Iterable[Kernel], own: Exchanges, earlier: Exchanges | None) -> Iterator[Item]:
    """What follows all products: the exchanges of an earlier call of the operator, then the own ones, each after its sum."""
    sums = iter(sums)
    yield from earlier.finish() if earlier else ()
    while own.are_left:
        yield from own.start(*islice(sums, 1))


def cut_at_wgrad(work: Work, items: list[Item]) -> tuple[list[Item], list[Item]]:
    """What is enqueued before a weight gradient, and after it: of the own exchanges the first is before, because those of what
    is gathered again are (ResultCrossings.send)."""
    own = (at + 1 for at, item in enumerate(items) if isinstance(item, Send) and item.call == work.call)
    cut = next(own, len(items))
    return items[:cut], items[cut:]


def in_places(system: System, items: Sequence[Item]) -> list[Item]:
    """The same with their places in the one hardware queue, if streams share one and something crosses. With a queue for each
    stream an exchange arrives when it has crossed."""
    if system.connections == 1 and any(isinstance(item, Send) for item in items):
        return [replace(item, place=place) for place, item in enumerate(items)]
    return [item for item in items if not isinstance(item, Arrival)]
