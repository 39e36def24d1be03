"""One rank in a simulation: its streams of kernels, SMs that take tiles in order, and its senders."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ....schedule.transfers import Leg
from .clock import Clock
from .hardware_queue import Action, HardwareQueue, SharedSms
from .timeline import COMMUNICATION, WAITING, Kernel, Program, Send, Span, Tile, Token

SIGNAL_SHARE = 0.5  # of what a push adds: half before the copy, half for the signal after it


def _crossed(token: Token) -> Token:
    """What has crossed the network, but is not yet let arrive."""
    return ("crossed", *token)


@dataclass(eq=False)
class Grid:
    """A persistent kernel that runs. tiles: that nobody has taken. sms: that have not left."""

    kernel: Kernel
    start: float
    done: Action
    tiles: deque[Tile]
    sms: int


class SimulatedRank:
    """One rank's streams, SMs and senders. carry: starts a copy of what this rank sends, and tells when it has arrived. deliver:
    what a leg of a call carries has arrived from this rank."""

    def __init__(
        self,
        clock: Clock,
        program: Program,
        carry: Callable[[Send, int, Action], None],
        deliver: Callable[[str, Leg, int], None],
    ) -> None:
        self._clock, self.program = clock, program
        self._carry, self._deliver = carry, deliver
        self._reached: set[Token] = set()
        self._waiting: dict[Token, list[Action]] = {}
        self._parts = Counter(fills for k in program.kernels for t in k.tiles for fills in t.fills)
        self._stored_at: dict[int, float] = {}  # by SM, when its last tile was at the peer
        self._wire_free = 0.0  # of stores to peers
        self._tiles: dict[Token | None, deque[Tile]] = {}  # not taken, by the start of their kernel
        self._left = len(program.kernels) + len(program.sends)
        self._queue, self._sms = HardwareQueue(), SharedSms()
        self._let_arrive = {arrival.token for arrival in program.arrivals}

    def start(self) -> None:
        for arrival in self.program.arrivals:
            let_arrive = partial(self._queue.start, arrival, partial(self.reach, arrival.token))
            self._when((_crossed(arrival.token),), let_arrive)
        for stream in sorted({kernel.stream for kernel in self.program.kernels}):
            self._next_kernel([kernel for kernel in self.program.kernels if kernel.stream == stream], 0)
        for lane in dict.fromkeys(send.lane for send in self.program.sends):
            self._next_send([send for send in self.program.sends if send.lane == lane], 0)

    def check_done(self) -> None:
        if self._left:
            tokens = ", ".join(" ".join(map(str, token)) for token in list(self._waiting)[:3]) or "its turn"
            raise ValueError(f"rank {self.program.rank} waits for what never comes: {tokens}; the schedule is wrong")
        if left := sum(map(len, self._tiles.values())):
            raise ValueError(
                f"rank {self.program.rank} has {left} tiles that no launch has taken; the program is wrong"
            )

    def take(self, token: Token) -> None:
        """Something has come to this rank."""
        self.reach(_crossed(token) if token in self._let_arrive else token)

    def reach(self, token: Token | None) -> None:
        """Something has happened; what waited for it goes on."""
        if token is None:
            return
        self._reached.add(token)
        self._clock.tokens.append((self.program.rank, token, self._clock.now))
        for action in self._waiting.pop(token, ()):
            action()

    def _when(self, needs: tuple[Token, ...], action: Action, first: int = 0) -> None:
        """Run `action` when all of needs[first:] have happened. What has happened stays so: nothing is looked at twice."""
        for index in range(first, len(needs)):
            if needs[index] not in self._reached:
                self._waiting.setdefault(needs[index], []).append(partial(self._when, needs, action, index + 1))
                return
        action()

    # streams

    def _next_kernel(self, stream: list[Kernel], index: int) -> None:
        if index == len(stream):
            return
        kernel = stream[index]
        self._sms.comes(kernel)
        self._clock.at(self._clock.now + kernel.gap_us, partial(self._open, kernel, stream, index))

    def _open(self, kernel: Kernel, stream: list[Kernel], index: int) -> None:
        run = partial(self._run, kernel, stream, index)
        if kernel.kind == WAITING:
            self._queue.start(kernel, lambda: self._when(kernel.needs, partial(run, self._clock.now)))
        else:
            self._when(kernel.needs, partial(self._queue.start, kernel, run))

    def _run(self, kernel: Kernel, stream: list[Kernel], index: int, since: float | None = None) -> None:
        start = self._clock.now if since is None else since
        done = partial(self._close, kernel, stream, index, start)
        if kernel.starts not in self._tiles:  # its first launch
            self.reach(kernel.starts)
        tiles, late_us = self._tiles_of(kernel), self._sms.starts(kernel)
        if not tiles:
            self._clock.at(self._clock.now + kernel.us + late_us, done)
            return
        grid = Grid(kernel, start, done, tiles, min(kernel.sms, len(tiles)))
        for sm in range(grid.sms):
            self._clock.at(start + kernel.us / 2, partial(self._claim, grid, sm))

    def _tiles_of(self, kernel: Kernel) -> deque[Tile]:
        """The tiles that a launch takes: what is left, but those that lack something from another node if it leaves."""
        left = self._tiles.setdefault(kernel.starts, deque(kernel.tiles)) if kernel.tiles else deque[Tile]()
        if not kernel.leaves:
            return left
        here = deque[Tile]()
        while left and self._reached.issuperset(left[0].far):
            here.append(left.popleft())
        return here

    def _close(self, kernel: Kernel, stream: list[Kernel], index: int, start: float) -> None:
        now = self._clock.now
        self._clock.spans.append(
            Span(self.program.rank, f"stream {kernel.stream}", kernel.name, kernel.kind, start, now)
        )
        self._left -= 1
        self._sms.ends(kernel)
        self._next_kernel(stream, index + 1)
        self.reach(kernel.ends)

    # SMs

    def _claim(self, grid: Grid, sm: int) -> None:
        if not grid.tiles:
            self._leave(grid)
            return
        tile = grid.tiles.popleft()
        self._when(tile.needs, partial(self._multiply, grid, sm, tile))

    def _leave(self, grid: Grid) -> None:
        grid.sms -= 1
        if not grid.sms:
            self._clock.at(max(self._clock.now, self._wire_free) + grid.kernel.us / 2, grid.done)

    def _multiply(self, grid: Grid, sm: int, tile: Tile) -> None:
        now = self._clock.now
        # the buffer of the tile before must have left
        end = max(now + tile.us, self._stored_at.get(sm, 0.0))
        self._clock.at(end, partial(self._end_product, grid, sm, tile, now))

    def _end_product(self, grid: Grid, sm: int, tile: Tile, start: float) -> None:
        if tile.fills:
            self._store(sm, tile)
        self._add(grid, sm, tile, start)

    def _add(self, grid: Grid, sm: int, tile: Tile, start: float) -> None:
        finish = partial(self._finish_tile, grid, sm, tile, start)
        if tile.adds:
            self._when(tile.adds, lambda: self._clock.at(self._clock.now + tile.adds_us, finish))
        else:
            finish()

    def _finish_tile(self, grid: Grid, sm: int, tile: Tile, start: float) -> None:
        now = self._clock.now
        self._clock.tiles.append(
            Span(self.program.rank, f"SM {sm}", grid.kernel.name, grid.kernel.kind, start, now, tile.place)
        )
        self._claim(grid, sm)

    def _store(self, sm: int, tile: Tile) -> None:
        if tile.legs:
            self._wire_free = max(self._wire_free, self._clock.now) + tile.nbytes / (self.program.store_gbs * 1e3)
            self._stored_at[sm] = self._wire_free
            self._clock.at(self._wire_free, partial(self._count, tile))
        else:
            self._count(tile)

    def _count(self, tile: Tile) -> None:
        """The last tile of a chunk notifies who waits for it."""
        for place, fills in enumerate(tile.fills):
            self._parts[fills] -= 1
            if not self._parts[fills]:
                self.reach(fills)
                if tile.legs:
                    self._deliver(str(fills[1]), tile.legs[place], self.program.rank)

    # senders

    def _next_send(self, lane: list[Send], index: int) -> None:
        if index < len(lane):
            send, begin = lane[index], partial(self._begin, lane, index)
            self._when(() if send.ready is None else (send.ready,), partial(self._queue.start, send, begin))

    def _begin(self, lane: list[Send], index: int) -> None:
        start = self._clock.now
        self._sms.exchange_starts(lane[index])
        copy = partial(self._copy, lane, index, start)
        self._clock.at(start + (1 - SIGNAL_SHARE) * lane[index].overhead_us, copy)

    def _copy(self, lane: list[Send], index: int, start: float) -> None:
        self._carry(lane[index], self.program.rank, partial(self._signal, lane, index, start))

    def _signal(self, lane: list[Send], index: int, start: float) -> None:
        done = partial(self._sent, lane, index, start)
        self._clock.at(self._clock.now + SIGNAL_SHARE * lane[index].overhead_us, done)

    def _sent(self, lane: list[Send], index: int, start: float) -> None:
        send, now = lane[index], self._clock.now
        leg = send.leg
        place = (leg.target, leg.block, leg.chunk)
        self._clock.spans.append(
            Span(self.program.rank, send.lane, f"{send.call} to {leg.target}", COMMUNICATION, start, now, place)
        )
        self._left -= 1
        self._sms.exchange_ends(send)
        self._deliver(send.call, leg, self.program.rank)
        self._next_send(lane, index + 1)
