"""What a rank sends: the legs of its plan, by copies inside the node, or across the network."""

from __future__ import annotations

from ....methods import TRAITS
from ....schedule.order import INBOUND
from ....schedule.transfers import NETWORK, Leg
from .across_nodes import in_order, lane_of, made, waits_for
from .enqueued import Exchanges
from .timeline import Send, Token
from .work import Work


def sends_by_copies(work: Work) -> bool:
    return work.world > 1 and TRAITS[work.plan.method].pushes


def inside_node(work: Work) -> list[Send]:
    """What is sent inside the node."""
    return [send for send in sends(work) if send.leg.link != NETWORK]


def crossings(work: Work) -> Exchanges:
    """What crosses the network."""
    crossing = [send for send in sends(work) if send.leg.link == NETWORK] if work.topology.nodes > 1 else []
    return Exchanges(work, crossing)


def sends(work: Work) -> list[Send]:
    """The plan's legs, in its order, by the copy engine, the network, or (direct) by stores of the kernel."""
    nbytes = work.shard_bytes / work.plan.chunks
    if work.plan.method == "direct":
        return [Send(work.call, leg, nbytes, work.system.store_gbs, 0.0, work.started) for leg in work.plan.legs]
    return [_send(work, leg, nbytes) for leg in in_order(work)]


def _send(work: Work, leg: Leg, nbytes: float) -> Send:
    system = work.system
    gbs, us = (system.nic_gbs, system.nic_us) if leg.link == NETWORK else (system.copy_gbs, system.push_us)
    return Send(work.call, leg, nbytes, gbs, us, waits_for(work, leg) or _ready(work, leg), lane_of(leg))


def _ready(work: Work, leg: Leg) -> Token:
    """The Token after which an own operand may leave."""
    if work.plan.kind in INBOUND:
        return work.begun
    return made(work, leg.block, leg.chunk if work.topology.nodes > 1 or leg.after_tiles else 0)
