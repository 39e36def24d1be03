"""Runs programs of ranks on resources: SMs that take tiles in order, a sender a rank, the links' ends, streams of kernels.

An event is a time and what happens then; what waits for a token is kept with it. With one program for a group of several ranks
that rank stands for all: all do the same at the same time, so a chunk that it sends to the d-th following rank arrives when
the chunk of the d-th preceding rank arrives here. A thousand ranks cost as much as one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from .simulated_rank import Action, SimulatedRank
from .timeline import Program, Send, Span, Timeline, Token, arrived


def simulate(programs: Sequence[Program], ingress_gbs: float) -> Timeline:
    """Run one program a rank, or one that stands for all. ingress_gbs: what a rank can receive.

    Raises:
        ValueError: something waits for what never comes.
    """
    world = _World(programs, ingress_gbs)
    world.run()
    return Timeline(tuple(world.spans), tuple(world.tiles), tuple(world.tokens))


class _World:
    """The clock, what happens next, and what has happened."""

    def __init__(self, programs: Sequence[Program], ingress_gbs: float) -> None:
        self.now = 0.0
        self.spans: list[Span] = []
        self.tiles: list[Span] = []
        self.tokens: list[tuple[int, Token, float]] = []
        self._events: list[tuple[float, int, Action]] = []
        self._count = 0
        self.stands_for_all = len(programs) < programs[0].world
        self.ranks = {program.rank: SimulatedRank(self, program) for program in programs}
        self.links = {rank: _Link(self, ingress_gbs) for rank in self.ranks}

    def at(self, time: float, action: Action) -> None:
        self._count += 1  # of two events at one time the one that was planned first happens first
        heapq.heappush(self._events, (time, self._count, action))

    def run(self) -> None:
        for rank in self.ranks.values():
            self.at(rank.program.start_us, rank.start)
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
        for rank in self.ranks.values():
            rank.check_done()

    def carry(self, send: Send, source: int, done: Action) -> None:
        """Over the end of the link at which it arrives. In step, every rank receives at its own as it sends."""
        link = self.links[source if self.stands_for_all else send.leg.target]
        link.carry(send.nbytes, send.gbs, done)

    def deliver(self, call: str, source: int, target: int, chunk: int) -> None:
        """A chunk of `source` has arrived at `target`."""
        if not self.stands_for_all:
            self.ranks[target].reach(arrived(call, source, chunk))
            return
        (rank,) = self.ranks.values()
        mirror = (2 * source - target) % rank.program.world
        rank.reach(arrived(call, mirror, chunk))


@dataclass(eq=False)
class _Flow:
    """A copy on its way: what is left of it, and since when that is right."""

    left: float
    gbs: float
    done: Action
    rate: float = 0.0
    since: float = 0.0
    version: int = 0


class _Link:
    """The end of a link at a rank that receives: copies that arrive at the same time share it."""

    def __init__(self, world: _World, gbs: float) -> None:
        self._world, self._gbs = world, gbs
        self._flows: list[_Flow] = []

    def carry(self, nbytes: float, gbs: float, done: Action) -> None:
        self._flows.append(_Flow(nbytes, gbs, done, since=self._world.now))
        self._share()

    def _share(self) -> None:
        now = self._world.now
        for flow in self._flows:
            flow.left -= flow.rate * (now - flow.since)
            flow.rate = min(flow.gbs, self._gbs / len(self._flows)) * 1e3  # bytes a microsecond
            flow.since, flow.version = now, flow.version + 1
            self._world.at(now + max(0.0, flow.left) / flow.rate, partial(self._finish, flow, flow.version))

    def _finish(self, flow: _Flow, version: int) -> None:
        if flow.version != version or flow not in self._flows:
            return  # its rate has changed since
        self._flows.remove(flow)
        self._share()
        flow.done()
