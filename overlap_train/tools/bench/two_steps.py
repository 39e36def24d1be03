"""NCCL in two steps, each byte crossing the network once and nothing overlapped: the baseline `by_nodes` of nodes with several
ranks, and the stronger one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...schedule.order import Topology


@dataclass(frozen=True)
class NodeGroups:
    """World's collectives in two steps. inside: the ranks of this node. across: this rank and its twins, node by node."""

    topology: Topology
    inside: dist.ProcessGroup
    across: dist.ProcessGroup

    @classmethod
    def of(cls, topology: Topology, group: dist.ProcessGroup) -> NodeGroups | None:
        """The NodeGroups of a group; None where there is one node, or one rank on each. Collective over the job."""
        if topology.nodes == 1 or topology.local == 1:
            return None
        ranks = dist.get_process_group_ranks(group)
        nodes = [[ranks[rank] for rank in topology.ranks_of(node)] for node in range(topology.nodes)]
        inside = [dist.new_group(members) for members in nodes]
        across = [dist.new_group(list(twins)) for twins in zip(*nodes, strict=True)]
        return cls(topology, inside[topology.node], across[topology.rank % topology.local])

    @property
    def size(self) -> int:
        """Of all ranks."""
        return self.topology.world

    def gather(self, shard: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """First between twins, then inside the node."""
        of_twins = shard.new_empty(self.topology.nodes * len(shard), shard.shape[1])
        dist.all_gather_into_tensor(of_twins, shard, group=self.across)
        for of_node, own in zip(whole.chunk(self.topology.nodes), of_twins.split(len(shard)), strict=True):
            dist.all_gather_into_tensor(of_node, own, group=self.inside)
        return whole

    def scatter(self, partial: torch.Tensor) -> torch.Tensor:
        rows = len(partial) // self.size
        sums = partial.new_empty(self.topology.nodes * rows, partial.shape[1])
        for own, of_node in zip(sums.split(rows), partial.chunk(self.topology.nodes), strict=True):
            dist.reduce_scatter_tensor(own, of_node, group=self.inside)
        y = partial.new_empty(rows, partial.shape[1])
        dist.reduce_scatter_tensor(y, sums, group=self.across)
        return y

    def exchange(self, blocks: torch.Tensor) -> torch.Tensor:
        topology, rows = self.topology, blocks.unflatten(0, (self.size, -1))
        arrived = torch.empty_like(rows)  # of each twin what it has for the ranks of this node
        dist.all_to_all_single(arrived, rows.contiguous(), group=self.across)
        of_nodes = arrived.unflatten(0, (topology.nodes, topology.local))
        for_peers = of_nodes.transpose(0, 1).contiguous().flatten(0, 1)
        received = torch.empty_like(for_peers)  # of each rank of this node what all its twins have for this one
        dist.all_to_all_single(received, for_peers, group=self.inside)
        return received.unflatten(0, (topology.local, topology.nodes)).transpose(0, 1).flatten(0, 2)
