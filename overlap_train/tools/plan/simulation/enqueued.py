"""In which order a rank enqueues kernels, exchanges with other nodes, and their arrivals, as operators/crossings.py does.

With one hardware queue (hardware_queue.py) the order counts. What copy engines send inside a node stands in no such queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from ....planning.machines import System
from ....schedule.inter_node import EXCHANGE, START, InFlight, SendRecv, Step, most_in_flight
from .across_nodes import turns
from .timeline import Arrival, Kernel, Send, arrived, landed
from .work import Work

Item = Kernel | Send | Arrival
Part = tuple[list[Item], list[Send]]  # what is enqueued, in order; copies inside the node


class Exchanges:
    """The exchanges of one call, in order. Each method says what is enqueued then, by the same steps as the engines'."""

    def __init__(self, work: Work, sends: Sequence[Send]) -> None:
        self._sends, self._arrivals = sends, [_arrival(work, crossing) for crossing in work.plan.send_recvs]
        self._flight = InFlight(len(sends), most_in_flight(work.plan.kind, len(sends)))

    @property
    def are_left(self) -> bool:
        """Whether there are some that have not started."""
        return self._flight.started < self._flight.count

    def start(self, *before: Kernel) -> Iterator[Item]:
        """The next one, after the sum that it sends, if there is one."""
        return self._enqueued(self._flight.start(), *before)

    def until(self, count: int) -> Iterator[Item]:
        return self._enqueued(self._flight.start_until(count))

    def go_ahead(self, done: int, parts: int) -> Iterator[Item]:
        return self._enqueued(self._flight.go_ahead(done, parts))

    def bring(self, count: int) -> Iterator[Item]:
        return self._enqueued(self._flight.bring(count))

    def bring_chunk(self, chunk: int, chunks: int) -> Iterator[Item]:
        return self._enqueued(self._flight.bring_chunk(chunk, chunks))

    def finish(self) -> Iterator[Item]:
        return self._enqueued(self._flight.finish())

    def _enqueued(self, steps: Iterator[Step], *before: Kernel) -> Iterator[Item]:
        for what, number in steps:
            if what == START:
                yield from before
                yield self._sends[number]
            else:
                yield self._arrivals[number]


def _arrival(work: Work, crossing: SendRecv) -> Arrival:
    leg = crossing.received
    if crossing.for_another:
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
