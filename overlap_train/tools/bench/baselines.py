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

from ...schedule.order import A2A_GEMM, GATHER, GEMM_A2A, INBOUND, SCATTER, Topology
from ..measure.cases import Case
from ..measure.models import MODELS
from ..measure.operands import Operands, side_by_side
from ..measure.runs import Run
from ..measure.world import World
from .async_tp import async_all_gather_matmul, async_matmul_reduce_scatter


def baselines_of(case: Case, world: World, sets: Sequence[Operands], by_nodes: NodeGroups | None) -> dict[str, Run]:
    """The baselines of a pass; `sets` are all inputs that they will get."""
    kind, like = case.kind, sets[0]
    buffer = torch.empty_like(like.whole if kind == GATHER else like.left[:0])
    found: dict[str, Run] = {
        "sequence": _one_after_the_other(kind, world, buffer),
        "gemm": (lambda o: o.whole @ o.right) if kind in INBOUND else (lambda o: o.left @ o.right),
    }
    if kind == GATHER:
        found["comm"] = lambda o: world.gather(o.left, buffer)
        found["async_tp"] = lambda o: async_all_gather_matmul(o.left, o.right, world.group)[1]
    elif kind == SCATTER:
        found["comm"] = lambda o: world.scatter(o.whole)
        found["async_tp"] = lambda o: async_matmul_reduce_scatter(o.left, o.right, world.group)
    elif kind == A2A_GEMM:
        found["comm"] = lambda o: world.exchange(o.left)
    else:
        blocks = like.left.new_zeros(like.whole.shape[0], like.right.shape[1] // world.size)
        found |= {"comm": lambda o: world.exchange(blocks), "three_gemms": _three_gemms(case, world, sets)}
    return found if by_nodes is None else found | {"by_nodes": _one_after_the_other(kind, by_nodes, buffer)}


def _one_after_the_other(kind: str, by: World | NodeGroups, buffer: torch.Tensor) -> Run:
    """The communication of a pass in one step, or in two, and its GEMM. buffer: for what is gathered."""
    runs: dict[str, Run] = {
        GATHER: lambda o: by.gather(o.left, buffer) @ o.right,
        SCATTER: lambda o: by.scatter(o.left @ o.right),
        GEMM_A2A: lambda o: by.exchange(blocks_for(by.size, o.left @ o.right)),
        A2A_GEMM: lambda o: side_by_side(by.size, by.exchange(o.left)) @ o.right,
    }
    return runs[kind]


def blocks_for(ranks: int, y: torch.Tensor) -> torch.Tensor:
    """y [M/W, F] as W blocks of rows [M, F/W], one after the other: block d has the columns for rank d."""
    return y.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous().flatten(0, 1)


def _three_gemms(case: Case, world: World, sets: Sequence[Operands]) -> Run:
    """y [M, F/W] = this rank's columns of what all ranks' left @ right give, as q, k and v."""
    weights = {id(o): three_weights(case, o.right, world.size) for o in sets}  # cut before anything is timed

    def run(o: Operands) -> tuple[torch.Tensor, ...]:
        parts, works = [], []
        for right in weights[id(o)]:
            part = blocks_for(world.size, o.left @ right)
            parts.append(torch.empty_like(part))
            works.append((dist.all_to_all_single(parts[-1], part, group=world.group, async_op=True), part))
        for work, _ in works:
            work.wait()
        return tuple(parts)

    return run


def three_weights(case: Case, right: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """right [K, F] as the weights of q, k and v, [K, a part of F] each, contiguous as in a model with three parameters.

    Each rank's columns are cut as the model's heads are in a QKV projection, equally elsewhere: Table 6 has one of three equal
    projections, and in an output projection's gradient nothing is q. Cuts are at whole heads of 128, where there are so many
    columns: 683 of 4096 would leave cuBLAS only kernels without TMA, as rows would not begin at 16 bytes.
    """
    rows, model = right.t().unflatten(0, (ranks, -1)), MODELS.get(case.model) if case.op == GEMM_A2A else None
    k_of_all = model.num_query_groups / (model.num_attention_heads + 2 * model.num_query_groups) if model else 1 / 3
    columns = rows.shape[1]
    head = 128 if columns >= 6 * 128 else 1
    k = max(1, round(columns * k_of_all / head)) * head
    return [part.flatten(0, 1).t() for part in rows.split((columns - 2 * k, k, k), dim=1)]


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
