"""What the Ulysses benchmark's baselines are made of, and the attention block in torch's words, with which all must agree."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...ulysses.attention_layout import Heads, Rotary, pack, unpack
from ...ulysses.layout import AttentionHeads, SequenceLayout
from ..measure.operands import all_to_all
from ..measure.world import World
from .attention_data import Data


def in_torchs_words(world: World, layout: SequenceLayout, data: Data) -> torch.Tensor:
    """The block by torch's own operations: what the results of all others must be. layout: which rows of the sequence x is."""
    y = exchange(F.linear(data.x, data.w_qkv), world.group, to_heads=True)
    rows = layout.rows_of_ranks(len(y), world.size, y.device).flatten()
    out = core_attention(*rotated(*split(y[rows.argsort()], data.heads.of_rank(world.size)), data.rotary))
    return F.linear(exchange(out[rows], world.group, to_heads=False), data.w_proj)


class Unpacked(torch.autograd.Function):
    """q, k, v from y [s, b, n], rotated, in the pass that our operator makes."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, heads: AttentionHeads, rotary: Rotary) -> Heads:  # type: ignore[no-untyped-def]
        ctx.rows, ctx.rotary = torch.arange(len(y), device=y.device), rotary
        q, k, v = (y.new_empty(*y.shape[:2], count, heads.dim) for count in (heads.query, heads.kv, heads.kv))
        unpack(y, None, ctx.rows, (q, k, v), rotary)
        return q, k, v

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[no-untyped-def]
        return pack(grads, ctx.rows, ctx.rotary), None, None  # type: ignore[arg-type]


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


class _Exchange(torch.autograd.Function):
    """[W, rows, C] to the ranks, block by block; its backward is itself."""

    @staticmethod
    def forward(ctx, blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.group = group
        return all_to_all(blocks, group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[no-untyped-def]
        return _Exchange.apply(grad.contiguous(), ctx.group), None


def exchange(x: torch.Tensor, group: dist.ProcessGroup, to_heads: bool) -> torch.Tensor:
    """x [s/W, b, n] -> [s, b, n/W], or back: an all-to-all with the copy that makes blocks contiguous."""
    world = dist.get_world_size(group)
    if to_heads:
        blocks = x.unflatten(-1, (world, -1)).movedim(2, 0).contiguous()
        return _Exchange.apply(blocks, group).flatten(0, 1)
    received = _Exchange.apply(x.unflatten(0, (world, -1)).contiguous(), group)
    return received.movedim(0, 2).flatten(2)
