"""Which ranks of a group form a node, whose memory they map: those of one operating system, or as many as node_ranks says.

Never by host name: containers share them. CPU processes reach each other through /proc, so they are in one PID namespace, too. If
ranks of a node cannot map each other's memory after all, its provider says so.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from ..config import OverlapConfig, flag_name
from ..ranks.agreement import Agreement, say_on_rank_0
from ..ranks.peers import machine
from ..schedule.order import Topology

_SETTINGS = ("node_ranks", "network", "network_sms", "reduce_sms")  # that all ranks must share


@dataclass(frozen=True)
class Nodes:
    """The nodes of a group, as this rank sees them. problem: why symmetric memory cannot serve the group, on all ranks alike, or
    None; topology then is that of one node."""

    topology: Topology
    problem: str | None = None


def find_nodes(agreement: Agreement, device: torch.device, config: OverlapConfig, what: str) -> Nodes:
    """The nodes of the agreement's group. Collective. Rank 0 prints them if there are several. what: what the ranks do here, for
    errors."""
    world, rank, node_ranks = agreement.world_size, agreement.rank, config.node_ranks
    if world == 1:
        return Nodes(Topology(1, world, rank))
    settings = {name: getattr(config, name) for name in _SETTINGS}
    told = agreement.exchange((settings, _place(device)), what, kind="first call of a group")
    places = [number // node_ranks for number in range(world)] if node_ranks else [place for _, place in told]
    problem = _setting_error([settings for settings, _ in told]) or nodes_error(places)
    if problem is not None:
        return Nodes(Topology(1, world, rank), problem)
    local = places.count(places[0])
    topology = Topology(world // local, local, rank)
    if topology.nodes > 1:
        transport = "gloo" if device.type == "cpu" else "NVSHMEM" if config.network == "nvshmem" else "NCCL"
        found = "as node_ranks says" if node_ranks else "found by operating system"
        nodes = f"a group of {world} ranks on {topology.nodes} nodes of {local}, {found}"
        say_on_rank_0(rank, f"{nodes}: {_listed(_ranks_by(places))}; {transport} between nodes")
    return Nodes(topology)


def _place(device: torch.device) -> str:
    """What ranks of one node have in common; empty where a system does not tell: its ranks are taken for one node."""
    return machine() if device.type == "cpu" else machine().partition("/")[0]


def _ranks_by(places: Sequence[Hashable]) -> list[list[int]]:
    """The ranks of each node, by the place of each rank."""
    return [[rank for rank, its in enumerate(places) if its == place] for place in dict.fromkeys(places)]


def nodes_error(places: Sequence[Hashable]) -> str | None:
    """What is wrong with the nodes of a group, or None. places: the node of each rank."""
    nodes = _ranks_by(places)
    if len({len(ranks) for ranks in nodes}) > 1:
        return (
            f"the group's nodes have unequal numbers of its ranks: {_listed(nodes)}; start as many on each node "
            f"(--nproc-per-node, --ntasks-per-node), choose a tensor-parallel size that fills nodes evenly, or use "
            f"method='collective'"
        )
    if [rank for ranks in nodes for rank in ranks] != list(range(len(places))):
        return (
            f"the group's ranks are not numbered node by node: {_listed(nodes)}; make the group of ranks that follow each "
            f"other in their node, or use method='collective'"
        )
    return None


def _setting_error(told: Sequence[dict[str, int | str]]) -> str | None:
    world, node_ranks = len(told), int(told[0]["node_ranks"])
    for name in _SETTINGS:
        values = [settings[name] for settings in told]
        if len(set(values)) > 1:
            return f"{name} is {', '.join(map(str, values))} on the ranks of the group; it must be the same on all"
    if node_ranks and world % node_ranks:
        return (
            f"node_ranks={node_ranks} does not divide the group's {world} ranks; use a divisor, or 0 to find the nodes "
            f"({flag_name('node_ranks')})"
        )
    return None


def _listed(nodes: Sequence[Sequence[int]]) -> str:
    """[(0, 1, 2, 5), (3, 4)] -> "ranks 0-2 5, 3-4"."""
    return f"ranks {', '.join(' '.join(in_ranges(ranks)) for ranks in nodes)}"


def in_ranges(numbers: Iterable[int]) -> list[str]:
    """[0, 1, 2, 5] -> ["0-2", "5"]."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0])]
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
