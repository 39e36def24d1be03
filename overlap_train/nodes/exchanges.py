"""What one call sends to and receives from other nodes: exchange after exchange, of which few are under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import cycle

import torch

from ..schedule.inter_node import EXCHANGE, FAR, SendRecv, exchanges_ahead, exchanges_before_wgrad, leaving
from ..schedule.order import Topology, Transfer
from .engines import Exchange, InterNodeEngine
from .plan import InterNodePlan
from .slots import NodeCall

# What an exchange sends, and what enqueues something that fills it.
Sent = tuple[torch.Tensor, Callable[[], None] | None]
MOST_UNDER_WAY = 2  # one crosses the network while the one before it is passed on


class Exchanges:
    """The exchanges of one call, in order, at most two of them under way: the oldest arrives before another one starts. Of a
    reduce-scatter all may be, because nothing is passed on.

    What is for another rank of this node comes into two receive buffers in turn. They are made before the engine is told
    `send_after_this`: until then the caller's stream may still use their memory.

    Exchanges of an earlier call of the operator cross first, all of them: of a column linear's backward x, for which the weight
    gradient waits while dx crosses. Exchange by exchange in turns, x would be complete only with the last of dx.

    operand: what they send, all of which is there from the beginning. None: they send a result, chunk by chunk, each after its
    product (`enqueue`, `send`). Beside a weight gradient some of these wait until that is enqueued (EnginePlan.beside_wgrad):
    with one hardware queue it would come after them all.
    """

    def __init__(
        self,
        engine: InterNodeEngine,
        call: NodeCall,
        plan: InterNodePlan,
        operand: Iterator[torch.Tensor] | None = None,
    ) -> None:
        self._engine, self._call, self._plan, self._all = engine, call, plan, plan.send_recvs
        self._operand, self._later = operand, deque[Sent]()
        self._most = len(self._all) if plan.kind.reduces else MOST_UNDER_WAY
        self._started, self._under_way = 0, deque[Exchange]()
        chunk, buffers = call.chunk_of(call.rank, 0), self._most if any(map(self._needs_buffer, self._all)) else 0
        self._buffers = cycle(chunk.new_empty(buffers, *chunk.shape))
        self._has_begun = self._follows = False

    def _needs_buffer(self, exchanged: SendRecv) -> bool:
        return exchanged.for_another and self._engine.network.needs_buffers

    def start(self) -> None:
        """Start the first exchange of an operand."""
        # Once, for all exchanges. If each waited for the product before it, the network would stand still whenever a product
        # takes longer than an exchange: the second of four, of 1.7 ms each, began 1.2 ms late (2 x H200, sockets).
        self._engine.send_after_this()
        self._start_until(1)

    def go_ahead(self, done: int, parts: int) -> None:
        """Start those of an operand that may cross while `done` of `parts` equal parts of a product, which are enqueued, run."""
        if self._operand is not None:
            self._start_until(exchanges_ahead(len(self._all), done, parts))

    def bring(self, count: int) -> None:
        """Let the first `count` arrive. One more is started before: what is owed goes before what is waited for."""
        assert count <= len(self._all), f"exchange {count} of {len(self._all)}"
        self._start_until(count + 1)
        self._arrive_until(count)

    def bring_chunk(self, chunk: int) -> None:
        """Let a chunk from all ranks arrive."""
        self.bring(len(self._all) // self._call.chunks * (chunk + 1))

    def send(self, source: torch.Tensor, make: Callable[[], None] | None = None) -> None:
        """Send in the next exchange, now or in `finish`, after the weight gradient that the caller enqueues in between."""
        self._begin()
        self._later.append((source, make))
        if not self._plan.beside_wgrad or self._started < exchanges_before_wgrad(len(self._all), self._follows):
            self._start_until(self._started + 1)

    def enqueue(
        self, topology: Topology, multiply: Callable[[int, int], None], sent: Callable[[Transfer], Sent]
    ) -> None:
        """Enqueue products and exchanges in turns (schedule/inter_node.py: leaving). multiply(block, chunk): a product."""
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
                self._later.append(sent(self._all[self._started].sent))
                self._start_until(self._started + 1)
        if between < len(self._all):
            engine.send_after_this()
        for exchanged in self._all[between:]:
            self.send(*sent(exchanged.sent))

    def _between(self) -> int:
        """How many exchanges come between the products."""
        if not self._plan.beside_wgrad:
            return len(self._all)
        return 0 if self._engine.has_started else exchanges_before_wgrad(len(self._all), follows=False)

    def finish(self) -> None:
        """Start what is left, and let all arrive. After an error a result may have fewer than the plan has."""
        self._start_until(len(self._all) if self._operand is not None else self._started + len(self._later))
        self._arrive_until(self._started)

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._follows = self._engine.finish_started()
            self._engine.at_end(self)

    def _start_until(self, count: int) -> None:
        """Start the first `count`, or as many as there are."""
        while self._started < min(count, len(self._all)):
            self._arrive_until(self._started + 1 - self._most)
            self._begin()
            exchanged = self._all[self._started]
            source, make = self._later.popleft() if self._operand is None else (next(self._operand), None)
            buffer = next(self._buffers) if self._needs_buffer(exchanged) else None
            exchange = Exchange(self._call, exchanged, source, make, buffer)
            self._engine.start_exchange(exchange)
            self._under_way.append(exchange)
            self._started += 1

    def _arrive_until(self, count: int) -> None:
        while self._started - len(self._under_way) < count:
            self._engine.arrive(self._under_way.popleft())
