"""NCCL in two steps, each byte crossing the network once and nothing overlapped: the baseline `by_nodes` of nodes with several
ranks, and the stronger one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ...schedule.order import Topology
from ..measure.world import World


@dataclass(frozen=True)
class TwoSteps:
    """World's collectives. inside: the ranks of this node. across: this rank and its rail peers, node by node."""

    size: int
    inside: World
    across: World

    @classmethod
    def of(cls, topology: Topology, world: World) -> TwoSteps | None:
        """Of a group's ranks; None where there is one node, or one rank on each. Collective over the job."""
        if 1 in (topology.nodes, topology.local):
            return None
        ranks = dist.get_process_group_ranks(world.group)
        nodes = [[ranks[rank] for rank in topology.ranks_of(node)] for node in range(topology.nodes)]
        inside = [dist.new_group(members) for members in nodes]
        across = [dist.new_group(list(rail_peers)) for rail_peers in zip(*nodes, strict=True)]
        local = topology.rank % topology.local
        return cls(
            world.size,
            replace(world, group=inside[topology.node], rank=local, size=topology.local),
            replace(world, group=across[local], rank=topology.node, size=topology.nodes),
        )

    def gather(self, shard: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        of_twins = self.across.gather(shard).split(len(shard))
        for of_node, own in zip(whole.chunk(self.across.size), of_twins, strict=True):
            self.inside.gather(own, of_node)
        return whole

    def scatter(self, partial: torch.Tensor) -> torch.Tensor:
        sums = partial.new_empty(len(partial) // self.inside.size, partial.shape[1])
        for own, of_node in zip(sums.chunk(self.across.size), partial.chunk(self.across.size), strict=True):
            self.inside.scatter(of_node, own)
        return self.across.scatter(sums)

    def exchange(self, blocks: torch.Tensor) -> torch.Tensor:
        arrived = self.across.exchange(blocks.contiguous()).unflatten(0, (self.across.size, self.inside.size, -1))
        received = self.inside.exchange(arrived.transpose(0, 1).contiguous())
        return received.transpose(0, 1).flatten(0, 2)
