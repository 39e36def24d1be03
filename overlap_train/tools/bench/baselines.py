"""What an operator is compared with, by name:

    sequence    NCCL (or gloo) and cuBLAS, one after the other; of an exchange with the copy that puts each rank's part together
    async_tp    PyTorch's async-TP
    three_gemms the asynchronous scheme: three GEMMs, each exchange under the GEMM of the next (of q under k's, of k under v's).
                Gives q, k and v as three tensors, as the models do that work like this
    by_nodes    NCCL in two steps where nodes have several ranks, each byte crossing the network once; nothing overlaps
    gemm, comm  each half of the work alone; only timed

All take the operands of their kind of pass (measure/operands.py). Buffers that a framework would reuse are reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...schedule.order import GATHER, GEMM_A2A, SCATTER, Topology
from ..measure.cases import EXCHANGES, Case
from ..measure.models import MODELS
from ..measure.operands import Operands, all_to_all, exchanged, side_by_side
from ..measure.runs import Run
from ..measure.world import World
from .async_tp import async_all_gather_matmul, async_matmul_reduce_scatter


def baselines_of(case: Case, world: World, sets: Sequence[Operands]) -> dict[str, Run]:
    """The baselines of a pass; `sets` are all inputs that they will get."""
    if case.op in EXCHANGES:
        return exchange_baselines(case, world, sets)
    return _scatter(world) if case.kind == "scatter" else _gather(world, sets[0])


def _gather(world: World, like: Operands) -> dict[str, Run]:
    """y [M, F] = all_gather(left) @ right"""
    buffer = torch.empty_like(like.whole)

    def comm(o: Operands) -> torch.Tensor:
        dist.all_gather_into_tensor(buffer, o.left, group=world.group)
        return buffer

    return {
        "sequence": lambda o: comm(o) @ o.right,
        "async_tp": lambda o: async_all_gather_matmul(o.left, o.right, world.group)[1],
        "gemm": lambda o: o.whole @ o.right,
        "comm": comm,
    }


def _scatter(world: World) -> dict[str, Run]:
    """y [M/W, F] = reduce_scatter(left @ right)"""

    def scattered(partial: torch.Tensor) -> torch.Tensor:
        y = partial.new_empty(partial.shape[0] // world.size, partial.shape[1])
        dist.reduce_scatter_tensor(y, partial, group=world.group)
        return y

    return {
        "sequence": lambda o: scattered(o.left @ o.right),
        "async_tp": lambda o: async_matmul_reduce_scatter(o.left, o.right, world.group),
        "gemm": lambda o: o.left @ o.right,
        "comm": lambda o: scattered(o.whole),
    }


def exchange_baselines(case: Case, world: World, sets: Sequence[Operands]) -> dict[str, Run]:
    """The baselines of a pass of linear_all_to_all or all_to_all_linear; `sets` are all inputs that they will get."""
    return _gemm_a2a(world, sets, shares_of(case)) if case.kind == GEMM_A2A else _a2a_gemm(world)


def _gemm_a2a(world: World, sets: Sequence[Operands], shares: tuple[int, int, int]) -> dict[str, Run]:
    """y [M, F/W] = this rank's columns of what all ranks' left @ right give"""
    like = sets[0]
    blocks = like.left.new_zeros(like.whole.shape[0], like.right.shape[1] // world.size)
    weights = {id(o): three_weights(o.right, world.size, shares) for o in sets}  # cut before anything is timed

    def three_gemms(o: Operands) -> tuple[torch.Tensor, ...]:
        parts, works = [], []
        for right in weights[id(o)]:
            part = blocks_for(world.size, o.left @ right)
            parts.append(torch.empty_like(part))
            works.append((dist.all_to_all_single(parts[-1], part, group=world.group, async_op=True), part))
        for work, _ in works:
            work.wait()
        return tuple(parts)

    return {
        "sequence": lambda o: all_to_all(blocks_for(world.size, o.left @ o.right), world.group),
        "three_gemms": three_gemms,
        "gemm": lambda o: o.left @ o.right,
        "comm": lambda o: all_to_all(blocks, world.group),
    }


def _a2a_gemm(world: World) -> dict[str, Run]:
    """y [M/W, F] = what all ranks have of this rank's rows @ right"""
    return {
        "sequence": lambda o: exchanged(o.left, world) @ o.right,
        "gemm": lambda o: o.whole @ o.right,
        "comm": lambda o: all_to_all(o.left, world.group),
    }


def blocks_for(ranks: int, y: torch.Tensor) -> torch.Tensor:
    """y [M/W, F] as W blocks of rows [M, F/W], one after the other: block d has the columns for rank d."""
    return y.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous().flatten(0, 1)


def three_weights(right: torch.Tensor, ranks: int, shares: tuple[int, int, int]) -> list[torch.Tensor]:
    """right [K, F] as the weights of q, k and v, [K, a part of F] each, contiguous as in a model with three parameters.

    Each rank's columns are cut. shares: of q, k and v (shares_of).
    """
    rows = right.t().unflatten(0, (ranks, -1))
    return [rows[:, first:last].flatten(0, 1).t() for first, last in three_parts(rows.shape[1], shares)]


def shares_of(case: Case) -> tuple[int, int, int]:
    """What q, k and v have of the columns: heads of the model in a QKV projection.

    Elsewhere they are equal: Table 6 has one of three equal projections, and in an output projection's gradient nothing is q.
    If q had two thirds, the scheme would hide less where the exchange takes longer than half the GEMM (at equal times 1.67
    instead of 1.33 GEMMs), and more elsewhere.
    """
    model = MODELS.get(case.model) if case.op == GEMM_A2A else None
    return (1, 1, 1) if model is None else (model.num_attention_heads, model.num_query_groups, model.num_query_groups)


def three_parts(columns: int, shares: tuple[int, int, int]) -> tuple[tuple[int, int], ...]:
    """Where q, k and v are among a rank's columns: at whole heads of 128, where there are so many columns. k and v are alike.

    Elsewhere rows of the product would not begin at 16 bytes: 683 of 4096 columns leave cuBLAS only kernels without TMA.
    """
    head = 128 if columns >= 6 * 128 else 1
    k = max(1, round(columns * shares[1] / sum(shares) / head)) * head
    return (0, columns - 2 * k), (columns - 2 * k, columns - k), (columns - k, columns)


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
