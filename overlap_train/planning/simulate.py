"""Runs programs of ranks on resources: SMs that take tiles in order, a sender a rank, the links' ends, streams of kernels.

An event is a time and what happens then; what waits for a token is kept with it. With one program for a group of several ranks
that rank stands for all: all do the same at the same time, so a chunk that it sends to the d-th following rank arrives when
the chunk of the d-th preceding rank arrives here. A thousand ranks cost as much as one.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from .timeline import (
    COMMUNICATION,
    COPIES,
    WAITING,
    Kernel,
    Program,
    Send,
    Span,
    Tile,
    Timeline,
    Token,
    arrived,
)

Action = Callable[[], None]
SIGNAL_SHARE = 0.5  # of what a push adds: half before the copy, half for the signal after it


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
        self.ranks = {program.rank: _Rank(self, program) for program in programs}
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

    def link_of(self, send: Send, source: int) -> _Link:
        """The end of the link at which a send arrives. In step, every rank receives at one as it sends at the other."""
        return self.links[source if self.stands_for_all else send.leg.target]

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


@dataclass(eq=False)
class _Grid:
    """A persistent kernel that runs: its next tile, and how many are not done."""

    kernel: Kernel
    start: float
    done: Action
    next: int = 0
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = len(self.kernel.tiles)


class _Rank:
    """One rank's streams, SMs and sender."""

    def __init__(self, world: _World, program: Program) -> None:
        self._world, self.program = world, program
        self._reached: set[Token] = set()
        self._waiting: dict[Token, list[Action]] = {}
        self._parts = Counter(t.fills for k in program.kernels for t in k.tiles if t.fills is not None)
        self._stored_at: dict[int, float] = {}  # by SM, when its last tile was at the peer
        self._wire_free = 0.0  # of stores to peers
        self._left = len(program.kernels) + len(program.sends)

    def start(self) -> None:
        for stream in sorted({kernel.stream for kernel in self.program.kernels}):
            self._next_kernel([kernel for kernel in self.program.kernels if kernel.stream == stream], 0)
        self._next_send(0)

    def check_done(self) -> None:
        if self._left:
            tokens = ", ".join(" ".join(map(str, token)) for token in list(self._waiting)[:3])
            raise ValueError(f"rank {self.program.rank} waits for what never comes: {tokens}; the schedule is wrong")

    def reach(self, token: Token | None) -> None:
        """Something has happened; what waited for it goes on."""
        if token is None:
            return
        self._reached.add(token)
        self._world.tokens.append((self.program.rank, token, self._world.now))
        for action in self._waiting.pop(token, ()):
            action()

    def _when(self, needs: tuple[Token, ...], action: Action) -> None:
        for token in needs:
            if token not in self._reached:
                self._waiting.setdefault(token, []).append(partial(self._when, needs, action))
                return
        action()

    # streams

    def _next_kernel(self, stream: list[Kernel], index: int) -> None:
        if index == len(stream):
            return
        kernel = stream[index]
        self._world.at(self._world.now + kernel.gap_us, partial(self._open, kernel, stream, index))

    def _open(self, kernel: Kernel, stream: list[Kernel], index: int) -> None:
        opened, run = self._world.now, partial(self._run, kernel, stream, index)
        self._when(kernel.needs, partial(run, opened) if kernel.kind == WAITING else run)

    def _run(self, kernel: Kernel, stream: list[Kernel], index: int, since: float | None = None) -> None:
        start = self._world.now if since is None else since
        done = partial(self._close, kernel, stream, index, start)
        self.reach(kernel.starts)
        if not kernel.tiles:
            self._world.at(self._world.now + kernel.us, done)
            return
        grid = _Grid(kernel, start, done)
        for sm in range(min(self.program.sms, len(kernel.tiles))):
            self._world.at(start + kernel.us / 2, partial(self._claim, grid, sm))

    def _close(self, kernel: Kernel, stream: list[Kernel], index: int, start: float) -> None:
        now = self._world.now
        self._world.spans.append(
            Span(self.program.rank, f"stream {kernel.stream}", kernel.name, kernel.kind, start, now)
        )
        self._left -= 1
        self.reach(kernel.ends)
        self._next_kernel(stream, index + 1)

    # SMs

    def _claim(self, grid: _Grid, sm: int) -> None:
        if grid.next == len(grid.kernel.tiles):
            return
        tile = grid.kernel.tiles[grid.next]
        grid.next += 1
        self._when(tile.needs, partial(self._multiply, grid, sm, tile))

    def _multiply(self, grid: _Grid, sm: int, tile: Tile) -> None:
        now = self._world.now
        # the buffer of the tile before must have left
        end = max(now + tile.us, self._stored_at.get(sm, 0.0))
        self._world.at(end, partial(self._add, grid, sm, tile, now))

    def _add(self, grid: _Grid, sm: int, tile: Tile, start: float) -> None:
        finish = partial(self._finish_tile, grid, sm, tile, start)
        if tile.adds:
            self._when(tile.adds, lambda: self._world.at(self._world.now + tile.adds_us, finish))
        else:
            finish()

    def _finish_tile(self, grid: _Grid, sm: int, tile: Tile, start: float) -> None:
        now = self._world.now
        self._world.tiles.append(
            Span(self.program.rank, f"SM {sm}", grid.kernel.name, grid.kernel.kind, start, now, tile.place)
        )
        if tile.leg is not None:
            self._wire_free = max(self._wire_free, now) + tile.nbytes / (self.program.store_gbs * 1e3)
            self._stored_at[sm] = self._wire_free
            self._world.at(self._wire_free, partial(self._count, tile))
        else:
            self._count(tile)
        grid.left -= 1
        if not grid.left:
            self._world.at(max(now, self._wire_free) + grid.kernel.us / 2, grid.done)
        self._claim(grid, sm)

    def _count(self, tile: Tile) -> None:
        """The last tile of a chunk announces it."""
        if tile.fills is None:
            return
        self._parts[tile.fills] -= 1
        if self._parts[tile.fills]:
            return
        self.reach(tile.fills)
        if tile.leg is not None:
            self._world.deliver(str(tile.fills[1]), self.program.rank, tile.leg.target, tile.leg.chunk)

    # the sender

    def _next_send(self, index: int) -> None:
        if index < len(self.program.sends):
            send = self.program.sends[index]
            needs = () if send.ready is None else (send.ready,)
            self._when(needs, partial(self._begin, send, index))

    def _begin(self, send: Send, index: int) -> None:
        start = self._world.now
        copy = partial(self._copy, send, index, start)
        self._world.at(start + (1 - SIGNAL_SHARE) * send.overhead_us, copy)

    def _copy(self, send: Send, index: int, start: float) -> None:
        link = self._world.link_of(send, self.program.rank)
        link.carry(send.nbytes, send.gbs, partial(self._signal, send, index, start))

    def _signal(self, send: Send, index: int, start: float) -> None:
        self._world.at(self._world.now + SIGNAL_SHARE * send.overhead_us, partial(self._sent, send, index, start))

    def _sent(self, send: Send, index: int, start: float) -> None:
        leg, now = send.leg, self._world.now
        place = (leg.target, leg.block, leg.chunk)
        self._world.spans.append(
            Span(self.program.rank, COPIES, f"{send.call} to {leg.target}", COMMUNICATION, start, now, place)
        )
        self._left -= 1
        self._world.deliver(send.call, leg.source, leg.target, leg.chunk)
        self._next_send(index + 1)
