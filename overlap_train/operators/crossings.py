"""What one call sends and receives across nodes of GPUs: exchange after exchange, of which few are under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle

import torch

from ..planning.engine_plan import EnginePlan
from ..planning.schedule.crossings import Crossing
from ..planning.schedule.legs import Leg
from ..planning.schedule.topology import Topology
from ..planning.schedule.turns import EXCHANGE, FAR, exchanges_ahead, exchanges_before_wgrad, leaving
from ..protocol.node_slot import NodeCall
from ..protocol.node_streams import NodeStreamEngine
from ..symmetric.inter_node import Exchange

_MOST = 2  # under way: one crosses the network while the one before it is passed on
# What an exchange sends, and what enqueues something that fills it.
Sent = tuple[torch.Tensor, Callable[[], None] | None]


class Crossings:
    """The exchanges of one call, in order. `most` are under way at most: `start` lets the oldest one arrive first.

    What is for another rank of this node lands in two places in turn. The exchange after the next writes into the same place; the
    engine holds it until this one has arrived and is passed on. Made before the engine is told `send_after_this`: until then the
    caller's stream may still use the memory of these places.

    Exchanges of an earlier call of the operator cross first, all of them: of a column linear's backward x, for which the weight
    gradient waits while dx crosses. Exchange by exchange in turns, x would be complete only with the last of dx.
    """

    def __init__(
        self, engine: NodeStreamEngine, call: NodeCall, crossings: Sequence[Crossing], most: int = _MOST
    ) -> None:
        self._engine, self._call, self._waiting, self._most = engine, call, deque(crossings), most
        self._under_way: deque[tuple[Crossing, Exchange, torch.Tensor | None]] = deque()
        self._count = len(crossings)
        places = most if any(map(self._lands, crossings)) else 0
        chunk = call.chunk_of(call.rank, 0)
        self._places = cycle(chunk.new_empty(places, *chunk.shape))
        self._has_begun = self._follows = False

    def _lands(self, crossing: Crossing) -> bool:
        return crossing.lands and self._engine.lands

    @property
    def next(self) -> Crossing | None:
        """The exchange that `start` starts next; None after the last one."""
        return self._waiting[0] if self._waiting else None

    @property
    def started(self) -> int:
        """How many have started."""
        return self._count - len(self._waiting)

    def start(self, source: torch.Tensor, make: Callable[[], None] | None = None) -> None:
        """Send `source` in the next exchange. make: see NodeStreamEngine.cross."""
        self._begin()
        if len(self._under_way) == self._most:
            self.arrive()
        crossing = self._waiting.popleft()
        landing = next(self._places) if self._lands(crossing) else None
        exchange = self._engine.cross(self._call, crossing, source, make, landing)
        self._under_way.append((crossing, exchange, landing))

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._follows = self._engine.finish_started()
            self._engine.at_end(self)

    def arrive(self) -> None:
        """Let the oldest exchange under way arrive."""
        crossing, exchange, landing = self._under_way.popleft()
        self._engine.arrive(self._call, crossing, exchange, landing)

    def go_ahead(self, done: int, parts: int) -> None:
        """See NodeStreamEngine.go_ahead. Of a result nothing is enqueued: it leaves after its own products."""

    def finish(self) -> None:
        """Let all arrive."""
        while self._under_way:
            self.arrive()


class OperandCrossings(Crossings):
    """The exchanges of an operand. All of it is there from the beginning, therefore the first exchange starts at once.

    source: what is sent in an exchange.
    """

    def __init__(
        self, engine: NodeStreamEngine, call: NodeCall, crossings: Sequence[Crossing],
        source: Callable[[Crossing], torch.Tensor],
    ) -> None:  # fmt: skip
        super().__init__(engine, call, crossings)
        self._source = source
        # Once, for all exchanges. If each waited for the product before it, the network would stand still whenever a product
        # takes longer than an exchange: the second of four, of 1.7 ms each, began 1.2 ms late (2 x H200, sockets).
        engine.send_after_this()
        self._start_until(1)

    def go_ahead(self, done: int, parts: int) -> None:
        """Enqueue the exchanges that may cross while `done` of `parts` equal parts of the product, which are enqueued, run."""
        self._start_until(exchanges_ahead(self._count, done, parts))

    def bring(self, count: int) -> None:
        """Let the first `count` exchanges arrive. One more is enqueued before: what is owed goes before what is waited for."""
        assert count <= self._count, f"exchange {count} of {self._count}"
        self._start_until(count + 1)
        while self.started - len(self._under_way) < count:
            self.arrive()

    def _start_until(self, count: int) -> None:
        while self.started < count and self.next is not None:
            self.start(self._source(self.next))

    def finish(self) -> None:
        """Start what is left, and let all arrive."""
        self._start_until(self._count)
        super().finish()


class ResultCrossings(Crossings):
    """The exchanges of a result. Each chunk leaves after its product.

    Beside a weight gradient some of them wait until that is enqueued (EnginePlan.beside_wgrad): with one hardware queue it would
    come after them all.
    """

    def __init__(self, engine: NodeStreamEngine, call: NodeCall, plan: EnginePlan, most: int = _MOST) -> None:
        super().__init__(engine, call, plan.crossings, most)
        self._plan, self._later = plan, deque[Callable[[], None]]()

    def send(self, source: torch.Tensor, make: Callable[[], None] | None = None) -> None:
        """The same as `start`, now or in `finish`, after the weight gradient that the caller enqueues in between."""
        self._begin()
        if not self._plan.beside_wgrad or self.started < exchanges_before_wgrad(self._count, self._follows):
            self.start(source, make)
        else:
            self._later.append(partial(self.start, source, make))

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
                self.start(*sent(plan.crossings[self.started].sent))
        if between < self._count:
            engine.send_after_this()
        for crossing in plan.crossings[between:]:
            self.send(*sent(crossing.sent))

    def _between(self) -> int:
        """How many exchanges come between the products."""
        if not self._plan.beside_wgrad:
            return self._count
        return 0 if self._engine.has_started else exchanges_before_wgrad(self._count, follows=False)

    def finish(self) -> None:
        """Start what `send` has left for now, and let all arrive."""
        while self._later:
            self._later.popleft()()
        super().finish()
