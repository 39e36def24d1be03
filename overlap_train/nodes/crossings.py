"""What one call sends and receives across nodes of GPUs: exchange after exchange, of which few are under way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from itertools import cycle

import torch

from ..ops.plan import EnginePlan
from ..schedule.inter_node import (
    EXCHANGE,
    FAR,
    START,
    Crossing,
    InFlight,
    Step,
    exchanges_before_wgrad,
    leaving,
    most_in_flight,
)
from ..schedule.order import Topology
from ..schedule.transfers import Leg
from .slots import NodeCall
from .streams import NodeStreamEngine
from .transport import Exchange

# What an exchange sends, and what enqueues something that fills it.
Sent = tuple[torch.Tensor, Callable[[], None] | None]


class Crossings(ABC):
    """The exchanges of one call, in order; how many are under way, schedule/in_flight.py says.

    What is for another rank of this node lands in two places in turn. The exchange after the next writes into the same place; the
    engine holds it until this one has arrived and is passed on. Made before the engine is told `send_after_this`: until then the
    caller's stream may still use the memory of these places.

    Exchanges of an earlier call of the operator cross first, all of them: of a column linear's backward x, for which the weight
    gradient waits while dx crosses. Exchange by exchange in turns, x would be complete only with the last of dx.
    """

    def __init__(self, engine: NodeStreamEngine, call: NodeCall, plan: EnginePlan) -> None:
        self._engine, self._call, self._crossings = engine, call, plan.crossings
        most = most_in_flight(plan.kind, len(plan.crossings))
        self._flight = InFlight(len(plan.crossings), most)
        self._under_way: deque[tuple[Exchange, torch.Tensor | None]] = deque()
        places = most if any(map(self._lands, plan.crossings)) else 0
        chunk = call.chunk_of(call.rank, 0)
        self._places = cycle(chunk.new_empty(places, *chunk.shape))
        self._has_begun = self._follows = False

    def _lands(self, crossing: Crossing) -> bool:
        return crossing.lands and self._engine.lands

    def _take(self, steps: Iterator[Step], sent: Callable[[Crossing], Sent]) -> None:
        """Enqueue what is due. sent: what an exchange sends."""
        for what, number in steps:
            crossing = self._crossings[number]
            if what == START:
                self._start(crossing, *sent(crossing))
            else:
                self._engine.arrive(self._call, crossing, *self._under_way.popleft())

    def _start(self, crossing: Crossing, source: torch.Tensor, make: Callable[[], None] | None) -> None:
        self._begin()
        landing = next(self._places) if self._lands(crossing) else None
        exchange = self._engine.cross(self._call, crossing, source, make, landing)
        self._under_way.append((exchange, landing))

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._follows = self._engine.finish_started()
            self._engine.at_end(self)

    @abstractmethod
    def go_ahead(self, done: int, parts: int) -> None:
        """Enqueue what may cross while `done` of `parts` equal parts of a product, which are enqueued, run."""

    @abstractmethod
    def finish(self) -> None:
        """Start what is left, and let all arrive."""


class OperandCrossings(Crossings):
    """The exchanges of an operand. All of it is there from the beginning. source: what is sent in an exchange."""

    def __init__(
        self, engine: NodeStreamEngine, call: NodeCall, plan: EnginePlan, source: Callable[[Crossing], torch.Tensor]
    ) -> None:
        super().__init__(engine, call, plan)
        self._source = source

    def start(self) -> None:
        """Start the first exchange."""
        # Once, for all exchanges. If each waited for the product before it, the network would stand still whenever a product
        # takes longer than an exchange: the second of four, of 1.7 ms each, began 1.2 ms late (2 x H200, sockets).
        self._engine.send_after_this()
        self._take(self._flight.start_until(1), self._sent)

    def _sent(self, crossing: Crossing) -> Sent:
        return self._source(crossing), None

    def go_ahead(self, done: int, parts: int) -> None:
        self._take(self._flight.go_ahead(done, parts), self._sent)

    def bring(self, count: int) -> None:
        """Let the first `count` exchanges arrive."""
        self._take(self._flight.bring(count), self._sent)

    def bring_chunk(self, chunk: int) -> None:
        """Let a chunk from all ranks arrive."""
        self._take(self._flight.bring_chunk(chunk, self._call.chunks), self._sent)

    def finish(self) -> None:
        self._take(self._flight.finish(), self._sent)


class ResultCrossings(Crossings):
    """The exchanges of a result. Each chunk leaves after its product.

    Beside a weight gradient some of them wait until that is enqueued (EnginePlan.beside_wgrad): with one hardware queue it would
    come after them all.
    """

    def __init__(self, engine: NodeStreamEngine, call: NodeCall, plan: EnginePlan) -> None:
        super().__init__(engine, call, plan)
        self._plan, self._later = plan, deque[Sent]()

    def send(self, source: torch.Tensor, make: Callable[[], None] | None = None) -> None:
        """Send in the next exchange, now or in `finish`, after the weight gradient that the caller enqueues in between."""
        self._begin()
        self._later.append((source, make))
        if not self._plan.beside_wgrad or self._flight.started < self._before_wgrad(self._follows):
            self._take(self._flight.start(), self._next)

    def _next(self, crossing: Crossing) -> Sent:
        return self._later.popleft()

    def go_ahead(self, done: int, parts: int) -> None:
        """Do nothing: a result leaves after its own products."""

    def enqueue(self, topology: Topology, multiply: Callable[[int, int], None], sent: Callable[[Leg], Sent]) -> None:
        """Enqueue products and exchanges in turns (schedule/turns.py).

        multiply(block, chunk): a product.
        """
        plan, engine, marks, done = self._plan, self._engine, deque[int](), 0
        between = self._between()
        for what, units in leaving(plan.kind, topology, plan.chunks, between):
            for unit in units:
                multiply(*unit)
                done += 1
                engine.go_ahead(done, topology.world * plan.chunks)
            if what == FAR:
                marks.append(engine.mark())
            elif what == EXCHANGE:
                engine.send_after(marks.popleft())
                self._take(self._flight.start(), lambda crossing: sent(crossing.sent))
        if between < self._flight.count:
            engine.send_after_this()
        for crossing in plan.crossings[between:]:
            self.send(*sent(crossing.sent))

    def _between(self) -> int:
        """How many exchanges come between the products."""
        if not self._plan.beside_wgrad:
            return self._flight.count
        return 0 if self._engine.has_started else self._before_wgrad(follows=False)

    def _before_wgrad(self, follows: bool) -> int:
        return exchanges_before_wgrad(self._flight.count, follows)

    def finish(self) -> None:
        """Start what `send` has left for now, and let all arrive. After an error there may be fewer than the plan has."""
        self._take(self._flight.start_until(self._flight.started + len(self._later)), self._next)
        self._take(self._flight.arrive(), self._next)
