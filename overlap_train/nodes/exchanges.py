"""What one call sends to and receives from other nodes: exchange after exchange, of which few are under way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from itertools import cycle

import torch

from ..schedule.inter_node import (
    EXCHANGE,
    FAR,
    START,
    InFlight,
    SendRecv,
    Step,
    exchanges_before_wgrad,
    leaving,
    most_in_flight,
)
from ..schedule.order import Topology, Transfer
from .engines import Exchange, InterNodeEngine
from .plan import InterNodePlan
from .slots import NodeCall

# What an exchange sends, and what enqueues something that fills it.
Sent = tuple[torch.Tensor, Callable[[], None] | None]


class Exchanges(ABC):
    """The exchanges of one call, in order; how many are under way, schedule/inter_node.py says.

    What is for another rank of this node comes into two receive buffers in turn. The exchange after the next writes into the same
    one; the engine holds it until this one has arrived and is passed on. Made before the engine is told `send_after_this`: until
    then the caller's stream may still use the memory of these buffers.

    Exchanges of an earlier call of the operator cross first, all of them: of a column linear's backward x, for which the weight
    gradient waits while dx crosses. Exchange by exchange in turns, x would be complete only with the last of dx.
    """

    def __init__(self, engine: InterNodeEngine, call: NodeCall, plan: InterNodePlan) -> None:
        self._engine, self._call, self._all = engine, call, plan.send_recvs
        most = most_in_flight(plan.kind, len(plan.send_recvs))
        self._flight = InFlight(len(plan.send_recvs), most)
        self._under_way: deque[tuple[Exchange, torch.Tensor | None]] = deque()
        buffers = most if any(map(self._needs_buffer, plan.send_recvs)) else 0
        chunk = call.chunk_of(call.rank, 0)
        self._buffers = cycle(chunk.new_empty(buffers, *chunk.shape))
        self._has_begun = self._follows = False

    def _needs_buffer(self, exchanged: SendRecv) -> bool:
        return exchanged.for_another and self._engine.needs_buffers

    def _take(self, steps: Iterator[Step], sent: Callable[[SendRecv], Sent]) -> None:
        """Enqueue what is due. sent: what an exchange sends."""
        for what, number in steps:
            exchanged = self._all[number]
            if what == START:
                self._start(exchanged, *sent(exchanged))
            else:
                self._engine.arrive(self._call, exchanged, *self._under_way.popleft())

    def _start(self, exchanged: SendRecv, source: torch.Tensor, make: Callable[[], None] | None) -> None:
        self._begin()
        buffer = next(self._buffers) if self._needs_buffer(exchanged) else None
        exchange = self._engine.start_exchange(self._call, exchanged, source, make, buffer)
        self._under_way.append((exchange, buffer))

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


class OperandExchanges(Exchanges):
    """The exchanges of an operand. All of it is there from the beginning. source: what is sent in an exchange."""

    def __init__(
        self, engine: InterNodeEngine, call: NodeCall, plan: InterNodePlan, source: Callable[[SendRecv], torch.Tensor]
    ) -> None:
        super().__init__(engine, call, plan)
        self._source = source

    def start(self) -> None:
        """Start the first exchange."""
        # Once, for all exchanges. If each waited for the product before it, the network would stand still whenever a product
        # takes longer than an exchange: the second of four, of 1.7 ms each, began 1.2 ms late (2 x H200, sockets).
        self._engine.send_after_this()
        self._take(self._flight.start_until(1), self._sent)

    def _sent(self, exchanged: SendRecv) -> Sent:
        return self._source(exchanged), None

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


class ResultExchanges(Exchanges):
    """The exchanges of a result. Each chunk leaves after its product.

    Beside a weight gradient some of them wait until that is enqueued (EnginePlan.beside_wgrad): with one hardware queue it would
    come after them all.
    """

    def __init__(self, engine: InterNodeEngine, call: NodeCall, plan: InterNodePlan) -> None:
        super().__init__(engine, call, plan)
        self._plan, self._later = plan, deque[Sent]()

    def send(self, source: torch.Tensor, make: Callable[[], None] | None = None) -> None:
        """Send in the next exchange, now or in `finish`, after the weight gradient that the caller enqueues in between."""
        self._begin()
        self._later.append((source, make))
        if not self._plan.beside_wgrad or self._flight.started < self._before_wgrad(self._follows):
            self._take(self._flight.start(), self._next)

    def _next(self, exchanged: SendRecv) -> Sent:
        return self._later.popleft()

    def go_ahead(self, done: int, parts: int) -> None:
        """Do nothing: a result leaves after its own products."""

    def enqueue(
        self, topology: Topology, multiply: Callable[[int, int], None], sent: Callable[[Transfer], Sent]
    ) -> None:
        """Enqueue products and exchanges in turns (schedule/inter_node.py: leaving).

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
                self._take(self._flight.start(), lambda exchanged: sent(exchanged.sent))
        if between < self._flight.count:
            engine.send_after_this()
        for exchanged in plan.send_recvs[between:]:
            self.send(*sent(exchanged.sent))

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
