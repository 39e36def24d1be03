"""Which ranks of a group form a node: those that can map each other's memory (reach.py), or as many as node_ranks says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from ..config import flag_name
from ..planning.schedule.topology import Topology
from .agreement import Agreement, say_on_rank_0
from .reach import new_sample

# What to do where ranks do not map each other: CPU processes see each other's files, GPUs of several hosts share a fabric.
_REMEDIES = {
    "cpu": "let them share one PID namespace and one user",
    "cuda": (
        f"NVLink's fabric joins some of their hosts only, or one way; look at its state and at IMEX on these hosts "
        f"(nvidia-smi -q, Fabric; nvidia-imex-ctl -N), say how many ranks a host has ({flag_name('node_ranks')})"
    ),
}
_FIND, _COMPARE = "overlap_train: find the nodes of the group", "overlap_train: compare the nodes of the group"


@dataclass(frozen=True)
class Nodes:
    """The nodes of a group, as this rank sees them. problem: why symmetric memory cannot serve the group, on all ranks alike, or
    None; topology then is that of one node."""

    topology: Topology
    problem: str | None = None


class NodeSettings(NamedTuple):
    """The settings of a rank that all ranks must share: see OverlapConfig."""

    node_ranks: int
    network: str
    network_sms: int
    reduce_sms: int


def find_nodes(agreement: Agreement, device: torch.device, settings: NodeSettings) -> Nodes:
    """The nodes of the agreement's group. Collective. Rank 0 prints them if there are several.

    Raises:
        OverlapTimeoutError: a rank did not come.
    """
    world, rank, node_ranks = agreement.world_size, agreement.rank, settings.node_ranks
    if world == 1:
        return Nodes(Topology(1, world, rank))
    told, reached = _look(agreement, device, settings)
    problem = _setting_error(told) or nodes_error(_as_told(world, node_ranks) if node_ranks else reached, device.type)
    if problem is not None:
        return Nodes(Topology(1, world, rank), problem)
    local = node_ranks or len(reached[0])
    topology = Topology(world // local, local, rank)
    if topology.nodes > 1:
        by_puts = settings.network == "nvshmem"
        transport = "gloo" if device.type == "cpu" else "NVSHMEM" if by_puts else "NCCL"
        say_on_rank_0(rank, _in_words(topology, node_ranks, transport))
    return Nodes(topology)


def nodes_error(reached: Sequence[tuple[int, ...]], device_type: str) -> str | None:
    """What is wrong with the nodes of a group, or None. reached: of each rank the ranks whose memory it can map, itself too."""
    for rank, ranks in enumerate(reached):
        other = next((peer for peer in ranks if reached[peer] != ranks), None)
        if rank not in ranks or other is not None:
            return (
                f"rank {rank} of the group can map the memory of ranks {_listed(ranks)}, but rank "
                f"{rank if other is None else other} that of {_listed(reached[rank if other is None else other])}; in a node "
                f"every rank maps every other: {_REMEDIES[device_type]}, or use method='collective'"
            )
    nodes = list(dict.fromkeys(reached))
    if len({len(ranks) for ranks in nodes}) > 1:
        return (
            f"the group's nodes have unequal numbers of its ranks: {_all_listed(nodes)}; start as many on each node "
            f"(--nproc-per-node, --ntasks-per-node), choose a tensor-parallel size that fills nodes evenly, or use "
            f"method='collective'"
        )
    if any(ranks != tuple(range(ranks[0], ranks[0] + len(ranks))) for ranks in nodes):
        return (
            f"the group's ranks are not numbered node by node: {_all_listed(nodes)}; make the group of ranks that follow each "
            f"other in their node, or use method='collective'"
        )
    return None


def _setting_error(told: Sequence[NodeSettings]) -> str | None:
    world, node_ranks = len(told), told[0].node_ranks
    for name, values in zip(NodeSettings._fields, zip(*told, strict=True), strict=True):
        if len(set(values)) > 1:
            return f"{name} is {', '.join(map(str, values))} on the ranks of the group; it must be the same on all"
    if node_ranks and world % node_ranks:
        return (
            f"node_ranks={node_ranks} does not divide the group's {world} ranks; use a divisor, or 0 to find the nodes "
            f"({flag_name('node_ranks')})"
        )
    return None


def _as_told(world: int, node_ranks: int) -> list[tuple[int, ...]]:
    ranks = [range(world)[first : first + node_ranks] for first in range(0, world, node_ranks)]
    return [tuple(node) for node in ranks for _ in node]


def _look(
    agreement: Agreement, device: torch.device, own: NodeSettings
) -> tuple[list[NodeSettings], list[tuple[int, ...]]]:
    """The settings of each rank, and for each the ranks whose memory it can map. Collective."""
    sample = new_sample(device)
    try:
        places = agreement.exchange((own, sample.told), _FIND)
        mine = tuple(rank for rank, (_, told) in enumerate(places) if sample.reaches(told))
        reached = agreement.exchange(mine, _COMPARE)  # and every peer has looked before it is closed
        return [settings for settings, _ in places], reached
    finally:
        sample.close()


def _in_words(topology: Topology, node_ranks: int, transport: str) -> str:
    mapped = "mapping memory" if transport == "gloo" else "operating system and NVLink fabric"
    found = "as node_ranks says" if node_ranks else f"found by {mapped}"
    ranks = ", ".join(_listed(tuple(topology.ranks_of(node))) for node in range(topology.nodes))
    return (
        f"a group of {topology.world} ranks on {topology.nodes} nodes of {topology.local}, {found}: "
        f"ranks {ranks}; {transport} between nodes"
    )


def _all_listed(nodes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(f"ranks {_listed(ranks)}" for ranks in nodes)


def _listed(ranks: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> "0-2 5"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda item: item[1] - item[0])]
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"
