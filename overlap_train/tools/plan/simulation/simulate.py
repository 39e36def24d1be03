"""Runs programs of ranks on resources: SMs that take tiles in order, senders, both ends of links, streams of kernels.

clock.py lets events happen in order; what waits for a token is kept by its rank. With one program for a group of several ranks
that rank stands for all: all do the same at the same time, so what it sends to the rank that is so many nodes, and places in its
node, further arrives when the same from the rank that is as many before arrives here. A thousand ranks cost as much as one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from ....schedule.order import Topology
from ....schedule.transfers import NETWORK, NVLINK, Leg
from .clock import Clock
from .hardware_queue import Action
from .simulated_rank import SimulatedRank
from .timeline import Program, Send, Timeline, arrived, landed


def simulate(programs: Sequence[Program], nvlink_gbs: float, nic_gbs: float = math.inf) -> Timeline:
    """Run one program a rank, or one that stands for all. nvlink_gbs, nic_gbs: what a rank can send, and receive.

    Raises:
        ValueError: something waits for what never comes.
    """
    world = World(programs, {NVLINK: nvlink_gbs, NETWORK: nic_gbs})
    world.run()
    clock = world.clock
    return Timeline(tuple(clock.spans), tuple(clock.tiles), tuple(clock.tokens))


class World:
    """The ranks, and what is between them: links, and who takes what has come over one."""

    def __init__(self, programs: Sequence[Program], gbs: dict[str, float]) -> None:
        self.clock = Clock()
        self.stands_for_all = len(programs) < programs[0].world
        self.ranks = {
            program.rank: SimulatedRank(self.clock, program, self.carry, self.deliver) for program in programs
        }
        self._sends_to = {(link, rank): _End(gbs[link]) for link in gbs for rank in self.ranks}
        self._receives = {(link, rank): _End(gbs[link]) for link in gbs for rank in self.ranks}

    def run(self) -> None:
        for rank in self.ranks.values():
            self.clock.at(rank.program.start_us, rank.start)
        self.clock.run()
        for rank in self.ranks.values():
            rank.check_done()

    def carry(self, send: Send, source: int, done: Action) -> None:
        """Start a copy over both ends of its link; `done` runs when it has arrived. Where one program stands for all ranks, it
        receives at its own end as it sends."""
        link, ranks = send.leg.link, self.ranks[source].program.group_of(send.call).ranks
        target = source if self.stands_for_all else ranks[send.leg.target]
        ends = (self._sends_to[link, source], self._receives[link, target])
        flow = _Flow(send.nbytes, send.gbs, done, ends, since=self.clock.now)
        for end in ends:
            end.flows.append(flow)
        self._share(ends)

    def _share(self, ends: tuple[_End, ...]) -> None:
        """Give all that use one of these ends their part of it."""
        now = self.clock.now
        for flow in dict.fromkeys(flow for end in ends for flow in end.flows):
            flow.left -= flow.rate * (now - flow.since)
            flow.rate = min(flow.gbs, *(end.gbs / len(end.flows) for end in flow.ends)) * 1e3  # bytes a microsecond
            flow.since, flow.version = now, flow.version + 1
            self.clock.at(now + max(0.0, flow.left) / flow.rate, partial(self._finish, flow, flow.version))

    def _finish(self, flow: _Flow, version: int) -> None:
        if flow.version != version or flow not in flow.ends[0].flows:
            return  # its rate has changed since
        for end in flow.ends:
            end.flows.remove(flow)
        self._share(flow.ends)
        flow.done()

    def deliver(self, call: str, leg: Leg, source: int) -> None:
        """What a leg of rank `source` carries has arrived: at who takes it from the network, or at its target."""
        group = self.ranks[source].program.group_of(call)
        taker = group.topology.receiver(leg.target) if leg.link == NETWORK else leg.target
        rank = self.ranks[source if self.stands_for_all else group.ranks[taker]]
        block = _mirror(group.topology, leg, taker) if self.stands_for_all else leg.fills
        if taker == leg.target:
            rank.take(arrived(call, block, leg.chunk))
            return
        here = rank.program.group_of(call).topology
        beside = here.ranks_of(here.node)[leg.target % here.local]
        rank.take(landed(call, beside, block, leg.chunk))


def _mirror(topology: Topology, leg: Leg, taker: int) -> int:
    """The block that a leg fills for who takes it, as the same leg of another rank fills it here."""
    local = topology.local
    (node, place), (there, beside), (to_node, to_place) = (divmod(r, local) for r in (leg.source, leg.fills, taker))
    return (node + there - to_node) % topology.nodes * local + (place + beside - to_place) % local


@dataclass(eq=False)
class _End:
    """One end of a link, where copies that use it at the same time share it."""

    gbs: float
    flows: list[_Flow] = field(default_factory=list)


@dataclass(eq=False)
class _Flow:
    """A copy on its way: what is left of it, and since when that is right."""

    left: float
    gbs: float
    done: Action
    ends: tuple[_End, _End]
    rate: float = 0.0
    since: float = 0.0
    version: int = 0
