"""What a rank does besides where its group spans nodes, as operators/ has it (NodeGather, NodeScatter).

Three things wait apart, so that none holds up another: own data for the network, what is passed on once it has arrived, and sums
of a node, each of which crosses the network when it is added.
"""

from __future__ import annotations

from . import cost
from .schedule import ARRIVED, NETWORK, NODE_SUM, SCATTER, Leg
from .timeline import COMPUTE, COPIES, PASSED_ON, TO_NETWORK, Kernel, Token, arrived
from .work import Work

SUMS = 2  # their stream; 1 is NCCL's (backward.py)


def multiplied(work: Work, block: int) -> Token:
    """This rank's product for a block, by the library."""
    return (work.call, "rows", block)


def summed(work: Work, block: int) -> Token:
    """The sum of this node's partials for a far block."""
    return (work.call, "sum", block)


def lane_of(leg: Leg) -> str:
    if leg.link == NETWORK:
        return TO_NETWORK
    return PASSED_ON if leg.carries == ARRIVED else COPIES


def waits_for(work: Work, leg: Leg) -> Token | None:
    """What a leg that does not carry an own operand waits for."""
    if leg.carries == NODE_SUM:
        return summed(work, leg.block)
    return arrived(work.call, leg.block, leg.chunk) if leg.carries == ARRIVED else None


def node_sums(work: Work) -> list[Kernel]:
    """A kernel for each far node, in the order of the products: it reads this node's partials, and writes their sum."""
    return [_node_sum(work, leg.block) for leg in work.plan.legs.network if leg.carries == NODE_SUM]


def _node_sum(work: Work, block: int) -> Kernel:
    ranks = work.topology.ranks_of(block // work.topology.local)
    needs = (multiplied(work, block), *(arrived(work.call, rank, 0) for rank in ranks if rank != block))
    us, gap = _node_sum_us(work), work.system.gap_us
    return Kernel("node sum", COMPUTE, us, gap, needs=needs, ends=summed(work, block), stream=SUMS)


def _node_sum_us(work: Work) -> float:
    return cost.sum_us(work.system, (work.topology.local + 1) * work.shard_bytes)


def beside_us(work: Work) -> float:
    """By how much each of W products is longer for what runs beside them: NCCL's kernels keep their SMs, and a node's sum, which
    wants all of them, takes its time from the products. Not measured."""
    system, far = work.system, work.topology.nodes - 1
    part = system.nic_sms / system.sms
    network = far * (system.nic_us + work.shard_bytes / (system.nic_gbs * 1e3))
    kept = part * min(network, work.world * work.part_us / (1 - part))
    sums = far * _node_sum_us(work) if work.plan.kind == SCATTER else 0.0
    return (kept + sums) / work.world
