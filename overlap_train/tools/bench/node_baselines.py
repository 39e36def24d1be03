"""NCCL in two steps where a group spans nodes, and then cuBLAS, or after it: the baseline `by_nodes`.

    gather     own shards to the twins, then inside each node what its ranks have received
    scatter    the sums of each node's partials inside that node, then those of all nodes
    exchange   to each twin what is for all ranks of its node, then inside each node

So each byte crosses the network once, as ours do (docs/multi-node.md), but nothing overlaps. With one rank a node it would be
what `sequence` is, and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...schedule.order import GATHER, GEMM_A2A, SCATTER, Topology
from ..measure.cases import Case
from ..measure.operands import Operands, side_by_side
from ..measure.runs import Run
from .exchange_baselines import blocks_for


@dataclass(frozen=True)
class NodeGroups:
    """The process groups for NCCL in two steps. inside: the ranks of this node. across: this rank and its twins, node by node."""

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

    def gather(self, shard: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Gather shards [M/W, C] of all ranks into whole [M, C], which is returned: first between twins, then inside the node."""
        of_twins = shard.new_empty(self.topology.nodes * len(shard), shard.shape[1])
        dist.all_gather_into_tensor(of_twins, shard, group=self.across)
        for of_node, own in zip(whole.chunk(self.topology.nodes), of_twins.split(len(shard)), strict=True):
            dist.all_gather_into_tensor(of_node, own, group=self.inside)
        return whole

    def scatter(self, partial: torch.Tensor) -> torch.Tensor:
        """The rows [M/W, C] of this rank of the sum of all ranks' partials [M, C]."""
        rows = len(partial) // self.topology.world
        sums = partial.new_empty(self.topology.nodes * rows, partial.shape[1])
        for own, of_node in zip(sums.split(rows), partial.chunk(self.topology.nodes), strict=True):
            dist.reduce_scatter_tensor(own, of_node, group=self.inside)
        y = partial.new_empty(rows, partial.shape[1])
        dist.reduce_scatter_tensor(y, sums, group=self.across)
        return y

    def exchange(self, blocks: torch.Tensor) -> torch.Tensor:
        """Exchange blocks of rows [M, C], one for each rank: those that all ranks have for this one, one after the other."""
        topology, rows = self.topology, blocks.unflatten(0, (self.topology.world, -1))
        arrived = torch.empty_like(rows)  # of each twin what it has for the ranks of this node
        dist.all_to_all_single(arrived, rows.contiguous(), group=self.across)
        of_nodes = arrived.unflatten(0, (topology.nodes, topology.local))
        for_peers = of_nodes.transpose(0, 1).contiguous().flatten(0, 1)
        received = torch.empty_like(for_peers)  # of each rank of this node what all its twins have for this one
        dist.all_to_all_single(received, for_peers, group=self.inside)
        return received.unflatten(0, (topology.local, topology.nodes)).transpose(0, 1).flatten(0, 2)


def node_baselines(case: Case, groups: NodeGroups | None, like: Operands) -> dict[str, Run]:
    """The baseline `by_nodes` of a pass, where it has one; like: one of its input sets."""
    if groups is None:
        return {}
    if case.kind == SCATTER:
        return {"by_nodes": lambda o: groups.scatter(o.left @ o.right)}
    if case.kind == GATHER:
        buffer = torch.empty_like(like.whole)
        return {"by_nodes": lambda o: groups.gather(o.left, buffer) @ o.right}
    ranks = groups.topology.world
    if case.kind == GEMM_A2A:
        return {"by_nodes": lambda o: groups.exchange(blocks_for(ranks, o.left @ o.right))}
    return {"by_nodes": lambda o: side_by_side(ranks, groups.exchange(o.left)) @ o.right}
