"""Whole attention blocks of Ulysses, forward and backward: projections, rotation, core attention, exchanges.

    x [s/W, 1, hidden] -> q, k, v of all rows -> causal attention -> y [s/W, 1, hidden]        dx, dw_qkv, dw_proj from dy

Each rank holds an equal part of the sequence, in order. The baseline `sequence` is the method `collective`: cuBLAS and NCCL's
all-to-all one after the other, and the same pass that splits and rotates. All must give what torch gives without ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from ...ulysses.attention_layout import Rotary
from ...ulysses.layout import AttentionHeads, SequenceShards
from ...ulysses.linears import attention_output_linear, qkv_all_to_all
from ..measure.models import MODELS, Model
from ..measure.runs import Inputs, Run, Session, normals
from ..measure.world import World
from .layers import Outcome, check_parts, gradients
from .turns import Contest

NAMES = ("y", "dx", "dw_qkv", "dw_proj")
ROUNDINGS = 16  # more than of one product: each result is one of several steps


@dataclass(frozen=True, eq=False)
class Data:
    """One rank's input, weights and output gradient; angles of the whole sequence."""

    heads: AttentionHeads
    x: torch.Tensor
    w_qkv: torch.nn.Parameter
    w_proj: torch.nn.Parameter
    dy: torch.Tensor
    rotary: Rotary

    @classmethod
    def make(cls, model: Model, tokens: int, world: World, dtype: torch.dtype, seed: int) -> Data:
        own, shared = normals(world, dtype, seed)
        (n, k), (hidden, features) = model.linears["qkv"], model.linears["proj"]
        heads = AttentionHeads(model.num_attention_heads, model.num_query_groups, model.head_width)
        angles = shared(tokens, heads.dim // 2).float().repeat(1, 2)
        return cls(
            heads,
            own(tokens // world.size, 1, k).requires_grad_(),
            torch.nn.Parameter(shared(n, k) / k**0.5),
            torch.nn.Parameter(shared(hidden, features) / features**0.5),
            own(tokens // world.size, 1, hidden),
            Rotary(angles.cos(), angles.sin()),
        )

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [self.x, self.w_qkv, self.w_proj]


def contests(models: Sequence[str], tokens: Sequence[int], session: Session) -> Iterator[Contest]:
    """Every block of these models, one after the other. Collective."""
    world = session.world
    methods = {method: ours(method, session) for method in session.methods}
    baselines = {"sequence": ours("collective", session)}
    for name in models:
        for number in tokens:
            data, decoy = (Data.make(MODELS[name], number, world, session.dtype, seed) for seed in (0, 99))
            head = {"layer": f"{name}-ulysses", "world": world.size, "seq": number}
            flops = 6 * data.x.numel() * (len(data.w_qkv) + len(data.w_proj))
            check = partial(check_parts, NAMES, without_ranks(world, data), roundings=ROUNDINGS)
            inputs = Inputs([data], decoy, check)
            yield Contest(f"{name} attention, {number} tokens", head, flops, inputs, methods, baselines, ("sequence",))


def ours(method: str, session: Session) -> Run:
    """Forward and backward of a block by our operators."""
    config, shards = replace(session.config, method=method), SequenceShards(session.world.group)

    def block(data: Data) -> torch.Tensor:
        q, k, v = qkv_all_to_all(data.x, data.w_qkv, shards=shards, heads=data.heads, rotary=data.rotary, config=config)
        return attention_output_linear(core_attention(q, k, v), data.w_proj, shards=shards, config=config)

    return lambda data: gradients([block(data)], data.leaves, [data.dy])


def without_ranks(world: World, data: Data) -> Outcome:
    """This rank's part of the block by torch's own operations on the whole sequence. Rows of other ranks give the weights no
    gradient here. Collective."""
    x, dy = (world.gather(t.detach().flatten(1)).unsqueeze(1) for t in (data.x, data.dy))
    first = world.rank * len(data.x)
    own = slice(first, first + len(data.x))
    qkv = F.linear(x, data.w_qkv.detach())
    qkv[own] = F.linear(data.x, data.w_qkv)
    core = core_attention(*rotated(*split(qkv, data.heads), data.rotary))
    y = F.linear(core, data.w_proj.detach())
    y[own] = F.linear(core[own], data.w_proj)
    whole_y, *grads = gradients([y], data.leaves, [dy])
    return (whole_y[own].clone(), *grads)


def core_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal, [s, b, heads, dim] -> [s, b, heads * dim]."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.permute(2, 0, 1, 3).flatten(2)


def split(y: torch.Tensor, heads: AttentionHeads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v [s, b, heads, dim] of y [s, b, n] in Megatron's order."""
    grouped = y.unflatten(-1, (heads.kv, heads.per_group + 2, heads.dim))
    q, k, v = grouped.split([heads.per_group, 1, 1], dim=-2)
    return q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)


def rotated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    cos, sin = (t.to(q.dtype)[:, None, None] for t in (rotary.cos, rotary.sin))

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return turned(q), turned(k), v
