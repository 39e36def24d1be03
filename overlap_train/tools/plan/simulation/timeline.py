"""What a pass is made of, and what a simulation of it says: programs of ranks, and spans of time.

A rank's program is its kernels, stream by stream, and what its copy engine sends, in order. Tokens are what things wait for:
("arrived", call, block, chunk), a chunk of a peer's block; ("landed", call, target, block, chunk), one that is for another rank
of the node; ("stored", call, block, chunk), all tiles of a chunk; or a kernel's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ....schedule.order import Topology
from ....schedule.transfers import Leg

Token = tuple[str | int, ...]
GEMM, COMPUTE, COMMUNICATION, WAITING = "gemm", "compute", "communication", "waiting"  # kinds of spans
SENDERS = COPIES, PASSED_ON, TO_NETWORK, EXCHANGES = "copies", "passed on", "network", "exchanges"


def arrived(call: str, block: int, chunk: int) -> Token:
    return ("arrived", call, block, chunk)


def landed(call: str, target: int, block: int, chunk: int) -> Token:
    return ("landed", call, target, block, chunk)


def stored(call: str, block: int, chunk: int) -> Token:
    return ("stored", call, block, chunk)


@dataclass(frozen=True)
class Tile:
    """A tile of a persistent kernel. place: (block, chunk, number). us: its product, on one SM.

    needs: arrivals that it waits for, holding its SM. far: all arrivals from other nodes that it needs. fills: the chunks that
    it is a part of after its product, where somebody waits for them. legs: of those chunks, where the kernel stores it at
    peers, with its bytes. adds: arrivals that it waits for then, to add them in adds_us.
    """

    place: tuple[int, int, int]
    us: float
    needs: tuple[Token, ...] = ()
    far: tuple[Token, ...] = ()
    adds: tuple[Token, ...] = ()
    adds_us: float = 0.0
    fills: tuple[Token, ...] = ()
    legs: tuple[Leg, ...] = ()
    nbytes: float = 0.0


@dataclass(frozen=True)
class Kernel:
    """One kernel, which starts gap_us after the one before it in its stream.

    us: on all SMs; of one with tiles what it takes before its first and after its last one. sms: that its tiles run on.
    needs: what must be there when it starts; a kernel that is WAITING runs meanwhile. ends: the token of its end.
    starts: that of its start. late_us: how much longer it takes beside an exchange that came first (hardware_queue.py).
    place: in the one hardware queue, if streams share one. leaves: it takes the tiles whose arrivals from other nodes are there
    when it starts; the next kernel of the same `starts` goes on with what is left.
    """

    name: str
    kind: str
    us: float = 0.0
    gap_us: float = 0.0
    needs: tuple[Token, ...] = ()
    ends: Token | None = None
    starts: Token | None = None
    tiles: tuple[Tile, ...] = ()
    sms: int = 0
    stream: int = 0
    leaves: bool = False
    late_us: float = 0.0
    place: int | None = None


@dataclass(frozen=True)
class Send:
    """A leg as a rank's sender takes it, in order. ready: what it waits for. overhead_us: beside the copy. gbs: of the sender.
    lane: which of the rank's senders takes it; none waits for another. place: as a Kernel's."""

    call: str
    leg: Leg
    nbytes: float
    gbs: float
    overhead_us: float = 0.0
    ready: Token | None = None
    lane: str = COPIES
    place: int | None = None


@dataclass(frozen=True)
class Arrival:
    """What lets an exchange arrive: from then on what it has brought, the token, counts as there. place: as a Kernel's."""

    token: Token
    place: int | None = None


@dataclass(frozen=True)
class Group:
    """The ranks among which a call is. topology: theirs, as this rank sees it. ranks: their numbers among all that are
    simulated."""

    topology: Topology
    ranks: Sequence[int]


@dataclass(frozen=True)
class Program:
    """One rank's part of a pass. host_us: until the call returns to Python. start_us: later than the first rank. store_gbs: what
    its kernels store at peers. nodes: that all ranks span. groups: of calls that are among some of the ranks only. arrivals: of
    exchanges that arrive in a hardware queue; others do at once."""

    rank: int
    world: int
    kernels: tuple[Kernel, ...]
    sends: tuple[Send, ...] = ()
    host_us: float = 0.0
    start_us: float = 0.0
    store_gbs: float = 1.0
    nodes: int = 1
    groups: Mapping[str, Group] = field(default_factory=dict)
    arrivals: tuple[Arrival, ...] = ()

    def group_of(self, call: str) -> Group:
        return self.groups.get(call, self._all_ranks)

    @cached_property
    def _all_ranks(self) -> Group:
        return Group(Topology(self.nodes, self.world // self.nodes, self.rank), range(self.world))


@dataclass(frozen=True)
class Span:
    """Something that ran from start to end. lane: its stream, its sender, or the SM of a tile. place: of a tile or leg."""

    rank: int
    lane: str
    name: str
    kind: str
    start: float
    end: float
    place: tuple[int, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """All spans of a simulation in the order in which they ended. tokens: when each was there, by rank."""

    spans: tuple[Span, ...]
    tiles: tuple[Span, ...]
    tokens: tuple[tuple[int, Token, float], ...]

    @property
    def us(self) -> float:
        """Microseconds until the last kernel of any rank ended."""
        return max((span.end for span in self.spans if span.lane not in SENDERS), default=0.0)
