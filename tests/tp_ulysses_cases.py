"""Cases of TP x Ulysses that tests between processes share: groups, inputs in integers, and what one process computes.

Attention is replaced by something that is exact in integers and mixes rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from overlap_train import (
    AttentionHeads,
    OverlapConfig,
    SequenceLayout,
    SequenceShards,
    attention_output_linear,
    qkv_all_to_all,
)
from overlap_train.group.registry import domain_of
from overlap_train.ops.plan_cache import cache_of

B, HIDDEN, DIM = 2, 24, 8
CONTIGUOUS = SequenceLayout()
LAYOUTS = (CONTIGUOUS, SequenceLayout("zigzag"), SequenceLayout("zigzag", (0, 16, 48)))


@dataclass(frozen=True)
class Grid:
    """T x W ranks: rank t + T r has tensor-parallel rank t, and rank r of Ulysses."""

    tensor: dist.ProcessGroup
    ulysses: dist.ProcessGroup

    @property
    def t(self) -> int:
        return self.tensor.rank()

    @property
    def r(self) -> int:
        return self.ulysses.rank()

    def shards(self, layout: SequenceLayout = CONTIGUOUS) -> SequenceShards:
        return SequenceShards(self.ulysses, layout, self.tensor)

    def rows(self, x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        """Of x [s, ...]: this rank's."""
        order = layout.rows_of_ranks(len(x), self.ulysses.size(), torch.device("cpu"))[self.r]
        return x.detach()[order[order >= 0].chunk(self.tensor.size())[self.t]].clone()


def grid(tensor: int = 2) -> Grid:
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = [list(range(first, first + tensor)) for first in range(0, world, tensor)]
    groups = [dist.new_group(ranks) for ranks in (*rows, *map(list, zip(*rows, strict=True)))]
    mine = [group for group in groups if dist.get_rank(group) >= 0]
    assert rank in rows[mine[1].rank()]
    return Grid(*mine)


def ulysses_across_nodes(
    tensor: dist.ProcessGroup, ulysses: dist.ProcessGroup, config: OverlapConfig, device: torch.device, **between: str
) -> None:
    """Make the groups' domains: each tensor-parallel group is a node, each rank of Ulysses in a node of its own. Calls then pass
    config=None, and go by these settings. between: other settings of Ulysses' domain."""
    for group, own in ((tensor, {"node_ranks": tensor.size()}), (ulysses, {"node_ranks": 1, **between})):
        domain = domain_of(group, replace(config, **own), device)  # type: ignore[arg-type]
        cache_of(domain, "test").defaults = domain.config


def integers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


@dataclass(frozen=True)
class Problem:
    """All weights, heads of all ranks, and an input."""

    s: int
    heads: AttentionHeads
    layout: SequenceLayout
    seed: int = 0

    def tensors(self) -> list[torch.Tensor]:
        """x, w_qkv, bias, w_proj, bias: leaves."""
        heads, q = self.heads, self.heads.query * DIM
        shapes = ((self.s, B, HIDDEN), (heads.features, HIDDEN), (heads.features,), (HIDDEN, q), (HIDDEN,))
        return [integers(*shape, seed=self.seed + i).requires_grad_() for i, shape in enumerate(shapes)]


def mixed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """In place of attention: every head by itself, every row another one's, exact in integers -> [s, b, features]."""
    kv = (k - 2 * v).repeat_interleave(q.size(2) // k.size(2), dim=2)
    return (q.roll(1, 0) + 2 * kv.flip(0)).remainder(7).flatten(2)


def whole(problem: Problem, dy: torch.Tensor) -> list[torch.Tensor]:
    """y and gradients of one process."""
    leaves = problem.tensors()
    x, w_qkv, bias, w_proj, b_proj = leaves
    heads = problem.heads
    groups = (x @ w_qkv.t() + bias).view(problem.s, B, heads.kv, heads.per_group + 2, DIM)
    q, k, v = groups[:, :, :, :-2].flatten(2, 3), groups[:, :, :, -2], groups[:, :, :, -1]
    y = mixed(q, k, v) @ w_proj.t() + b_proj
    return [y, *torch.autograd.grad(y, leaves, dy)]


def divided(g: Grid, problem: Problem, dy: torch.Tensor, config: OverlapConfig | None) -> list[torch.Tensor]:
    """This rank's y and gradients, summed over the ranks that have the same weights."""
    x, w_qkv, bias, w_proj, b_proj = (t.detach() for t in problem.tensors())
    tensor, heads = g.tensor.size(), problem.heads
    of_rank = replace(heads, query=heads.query // tensor, kv=heads.kv // tensor)
    leaves = [
        g.rows(x, problem.layout), w_qkv.chunk(tensor)[g.t].clone(), bias.chunk(tensor)[g.t].clone(),
        w_proj.chunk(tensor, 1)[g.t].clone(), b_proj.clone(),
    ]  # fmt: skip
    own, w_own, b_own, w_out, b_out = (t.requires_grad_() for t in leaves)
    common = dict(shards=g.shards(problem.layout), config=config)
    q, k, v = qkv_all_to_all(own, w_own, b_own, heads=of_rank, **common)
    y = attention_output_linear(mixed(q, k, v), w_out, b_out, **common)
    gradients = torch.autograd.grad(y, (own, w_own, b_own, w_out, b_out), g.rows(dy, problem.layout))
    for of_weight in gradients[1:]:
        dist.all_reduce(of_weight, group=g.ulysses)
    dist.all_reduce(gradients[4], group=g.tensor)
    return [y, *gradients]


def expected(g: Grid, problem: Problem, dy: torch.Tensor) -> list[torch.Tensor]:
    y, dx, dw, db, dw_out, db_out = whole(problem, dy)
    tensor, layout = g.tensor.size(), problem.layout
    return [
        g.rows(y, layout), g.rows(dx, layout), dw.chunk(tensor)[g.t], db.chunk(tensor)[g.t], dw_out.chunk(tensor, 1)[g.t], db_out
    ]  # fmt: skip


NAMES = ("y", "dx", "dw_qkv", "dbias_qkv", "dw_proj", "dbias_proj")
