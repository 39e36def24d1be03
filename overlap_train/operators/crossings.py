"""What one call sends and receives across nodes of GPUs: exchange after exchange, of which few are under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle

import torch

from ..planning.engine_plan import EnginePlan
from ..planning.schedule.crossings import Crossing
from ..planning.schedule.topology import Topology
from ..planning.schedule.turns import EXCHANGE, FAR, exchanges_ahead, leaving
from ..protocol.node_slot import NodeCall
from ..protocol.node_streams import NodeStreamEngine
from ..symmetric.inter_node import Exchange

_MOST = 2  # under way: one crosses the network while the one before it is passed on


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
        self._later = deque[Callable[[], None]]()

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

    def start_after(self, mark: int, source: torch.Tensor, make: Callable[[], None] | None = None) -> None:
        """The same, once the caller's stream has done what is marked (NodeStreamEngine.mark)."""
        self._begin()  # what an earlier call sends does not wait for that
        self._engine.send_after(mark)
        self.start(source, make)

    def start_beside_wgrad(self, source: torch.Tensor, make: Callable[[], None] | None = None) -> None:
        """The same as `start`, now or in `finish`: the caller enqueues a weight gradient in between.

        With one hardware queue the weight gradient waits for all exchanges that stand before it. So half of them do, and one more
        (schedule/turns.py: of two equal products one is done then). If an earlier call's exchanges stand there, only the first
        does.
        """
        self._begin()
        if self.started < (1 if self._follows else exchanges_ahead(self._count, 1, 2)):
            self.start(source, make)
        else:
            self._later.append(partial(self.start, source, make))

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._follows = self._engine.finish_started()
            self._engine.at_end(self.finish)

    def arrive(self) -> None:
        """Let the oldest exchange under way arrive, if there is one."""
        if self._under_way:
            crossing, exchange, landing = self._under_way.popleft()
            self._engine.arrive(self._call, crossing, exchange, landing)

    def finish(self) -> None:
        """Start what `start_beside_wgrad` has left for now, and let all arrive."""
        while self._later:
            self._later.popleft()()
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


def enqueue_leaving(
    engine: NodeStreamEngine, plan: EnginePlan, topology: Topology, multiply: Callable[[int, int], None],
    cross: Callable[[int], None],
) -> None:  # fmt: skip
    """Enqueue the products and exchanges of what leaves (schedule/turns.py).

    multiply(block, chunk): a product. cross(mark): the next exchange, after its products, which are marked.
    """
    marks = deque[int]()
    for what, units in leaving(plan.kind, topology, plan.chunks):
        for block, chunk in units:
            multiply(block, chunk)
        if what == FAR:
            marks.append(engine.mark())
        elif what == EXCHANGE:
            cross(marks.popleft())
