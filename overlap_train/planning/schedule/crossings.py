"""What a rank sends over the network, and what comes from there in the same turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .kinds import GATHER
from .legs import LANDED, NVLINK, Leg, Legs, legs
from .order import Unit
from .topology import Topology


@dataclass(frozen=True)
class Crossing:
    """What a rank sends over the network, what it receives meanwhile, and the legs that pass the latter on inside the node."""

    sent: Leg
    received: Leg
    passed_on: Legs

    @property
    def lands(self) -> bool:
        """Whether what is received is for another rank of this node, in whose memory the network does not write."""
        return self.received.target != self.sent.source


def crossings(kind: str, topology: Topology, chunks: int, tiled: bool = False) -> tuple[Crossing, ...]:
    """All of one pass, in order, for transports whose receiver must say what it expects: twins work out the same.

    The legs of all ranks go equally far in each turn. So twins come to their parts of a crossing in the same order, and what
    comes is what the rank so many nodes before sends: this rank's leg, moved back. To ask every twin for its legs would take
    minutes with 1,024 nodes.
    """
    mine, found = legs(kind, topology, chunks, tiled), []
    onward = mine.passed_on.by_unit
    for sent in mine.network:
        distance = sent.target // topology.local - topology.node
        received = _moved(kind, topology, sent, -distance)
        found.append(Crossing(sent, received, _passed_on(onward, topology.rank, received)))
    return tuple(found)


def _moved(kind: str, topology: Topology, leg: Leg, nodes: int) -> Leg:
    """The same leg of the rank that is `nodes` nodes further."""

    def moved(rank: int) -> int:
        return (rank + nodes * topology.local) % topology.world

    block = leg.block if kind == GATHER else moved(leg.block)
    return replace(leg, source=moved(leg.source), target=moved(leg.target), block=block, fills=moved(leg.fills))


def _passed_on(onward: Mapping[Unit, Legs], rank: int, received: Leg) -> Legs:
    """What rank `rank`, which passes on `onward`, does with what it has received."""
    block, chunk, target = received.fills, received.chunk, received.target
    if target != rank:
        return Legs((Leg(NVLINK, rank, target, block, chunk, False, fills=block, carries=LANDED),))
    return onward.get((block, chunk), Legs(()))
