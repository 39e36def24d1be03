"""Whole attention blocks of Ulysses, forward and backward: projections, rotation, core attention, exchanges.

    x [s/W, 1, hidden] -> q, k, v of all rows -> causal attention -> y [s/W, 1, hidden]        dx, dw_qkv, dw_proj from dy

Each rank holds an equal part of the sequence, in order. Beside ours, by name:

    sequence      the same block with NCCL's all-to-all and the copies that it needs
    alone         the same work without any exchange, which nobody can beat by hiding communication
    te, te_alone  the same two with TransformerEngine's attention, whose exchanges are its context parallelism by `a2a`

All split and rotate in one pass. TransformerEngine takes it that each rank holds two chunks of the sequence, a zigzag. So x is
read as such rows there, and the result must be that of torch's block on the same rows. Its core attention is cuDNN's or
FlashAttention's, that of all others torch's: te / te_alone and ms / alone say what the exchanges cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...config import OverlapConfig
from ...ulysses.attention_layout import Heads, Rotary, pack, unpack
from ...ulysses.layout import AttentionHeads, SequenceLayout, SequenceShards
from ...ulysses.linears import attention_output_linear, qkv_all_to_all
from ..measure.models import MODELS, Model
from ..measure.runs import Check, Inputs, Run, Session
from ..measure.world import World
from . import transformer_engine
from .layers import Outcome, gradients
from .turns import Contest, Way, Ways

Block = Callable[["Data"], torch.Tensor]
NAMES = ("y", "dx", "dw_qkv", "dw_proj")
COLUMNS = ("sequence", "alone", "te", "te_alone")
TILE = 128  # rows and columns; no kernel of ours has larger tiles in both


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
        own = torch.Generator(world.device).manual_seed(1000 * seed + world.rank)
        shared = torch.Generator(world.device).manual_seed(1000 * seed + 999)
        (n, k), (hidden, features) = model.linears["qkv"], model.linears["proj"]

        def normal(*shape: int, generator: torch.Generator) -> torch.Tensor:
            return torch.randn(*shape, dtype=dtype, device=world.device, generator=generator)

        heads = AttentionHeads(model.num_attention_heads, model.num_query_groups, model.head_width)
        angles = torch.randn(tokens, heads.dim // 2, device=world.device, generator=shared).repeat(1, 2)
        return cls(
            heads,
            normal(tokens // world.size, 1, k, generator=own).requires_grad_(),
            torch.nn.Parameter(normal(n, k, generator=shared) / k**0.5),
            torch.nn.Parameter(normal(hidden, features, generator=shared) / features**0.5),
            normal(tokens // world.size, 1, hidden, generator=own),
            Rotary(angles.cos(), angles.sin()),
        )


def contests(models: Sequence[str], tokens: Sequence[int], session: Session) -> Iterator[Contest]:
    """Every block of these models, one after the other. Collective."""
    world, settings = session.world, session.settings
    baselines: dict[str, Block] = {"sequence": partial(by_collectives, world), "alone": partial(alone, world)}
    ways = {name: Way(forward_backward(ours(settings.config, name, world.group)), name) for name in settings.methods}
    ways |= {name: Way(forward_backward(block)) for name, block in baselines.items()}
    for name in models:
        for number in tokens:
            yield contest_of(name, number, ways, session)


def contest_of(model: str, tokens: int, ways: Ways, session: Session) -> Contest:
    """All methods and baselines of one block, and its rows in layers.json."""
    world = session.world
    data, decoy = (Data.make(MODELS[model], tokens, world, session.settings.dtype, seed) for seed in (0, 99))
    inputs = Inputs([data], decoy, check_against(in_torchs_words(world, SequenceLayout(), tokens), data))
    head = {"layer": f"{model}-ulysses", "world": world.size, "seq": tokens}
    flops = 6 * data.x.numel() * (len(data.w_qkv) + len(data.w_proj))
    return Contest(
        f"{model} attention, {tokens} tokens", head, flops, inputs, ways, COLUMNS, partial(te_ways, world, data)
    )


def forward_backward(block: Block) -> Run:
    """What is timed."""
    return lambda data: gradients([block(data)], [data.x, data.w_qkv, data.w_proj], [data.dy])


def check_against(block: Block, data: Data) -> Check:
    """Whether results are those of a block, which rounds at other places: no tile of two CPU ranks in bf16 differs by 0.01."""
    expected = forward_backward(block)(data)
    tolerance = 8 * torch.finfo(expected[0].dtype).eps

    def check(name: str, outcome: Outcome) -> None:
        for part, mine, theirs in zip(NAMES, outcome, expected, strict=True):
            error = worst_tile(mine, theirs)
            if not error <= tolerance:
                raise RuntimeError(
                    f"{part} differs from torch's block by {error:.3g} of the norm of a tile; rounding explains {tolerance:.3g}"
                )

    return check


def worst_tile(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference in a tile of TILE x TILE elements, over the norm that theirs has there, or has in an average tile
    where that is more. Over the norm of the whole, a missing tile would hardly count."""

    def norms(x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(x.square()[None, None], TILE, ceil_mode=True, divisor_override=1)[0, 0].sqrt()

    pairs = zip(*(x.flatten(0, -2).split(32 * TILE) for x in (mine, theirs)), strict=True)
    parts = [(norms(a.double() - b.double()), norms(b.double())) for a, b in pairs]
    error, norm = (torch.cat(some) for some in zip(*parts, strict=True))
    return float((error / norm.clamp_min(norm.square().mean().sqrt())).max())


def ours(config: OverlapConfig, method: str, group: dist.ProcessGroup) -> Block:
    """One attention block by our operators."""
    config = replace(config, method=method)

    def block(data: Data) -> torch.Tensor:
        shards = SequenceShards(group)
        q, k, v = qkv_all_to_all(data.x, data.w_qkv, shards=shards, heads=data.heads, rotary=data.rotary, config=config)
        return attention_output_linear(core_attention(q, k, v), data.w_proj, shards=shards, config=config)

    return block


def by_collectives(world: World, data: Data, unpacked: Any = None, attention: Any = None) -> torch.Tensor:
    """One attention block by NCCL and cuBLAS, with one pass that splits and rotates as ours does."""
    y = exchange(F.linear(data.x, data.w_qkv), world, to_heads=True)
    heads = (unpacked or Unpacked.apply)(y, data.heads.of_rank(world.size), data.rotary)
    return F.linear(exchange((attention or core_attention)(*heads), world, to_heads=False), data.w_proj)


def alone(world: World, data: Data, attention: Any = None) -> torch.Tensor:
    """One attention block without communication. What a rank has is taken for what it would receive, which is as large."""
    y = F.linear(data.x, data.w_qkv).view(-1, 1, data.w_qkv.shape[0] // world.size)
    heads = Unpacked.apply(y, data.heads.of_rank(world.size), data.rotary)
    return F.linear((attention or core_attention)(*heads).reshape(len(data.x), 1, -1), data.w_proj)


def in_torchs_words(world: World, layout: SequenceLayout, tokens: int) -> Block:
    """The block by torch's own operations: what the results of all others must be. layout: which rows of the sequence x is."""
    rows = layout.rows_of_ranks(tokens, world.size, world.device).flatten()
    return partial(
        by_collectives,
        world,
        unpacked=lambda y, heads, rotary: rotated(*split(y[rows.argsort()], heads), rotary),
        attention=lambda q, k, v: core_attention(q, k, v)[rows],
    )


@contextmanager
def te_ways(world: World, data: Data, te: Any) -> Iterator[Ways]:
    """TransformerEngine's attention, with its exchanges and without. It is made at the first call."""
    tokens, zigzag = len(data.x) * world.size, SequenceLayout("zigzag")
    exchanging = cache(partial(transformer_engine.attention, te, data.heads, world))
    inside = cache(partial(transformer_engine.attention, te, data.heads.of_rank(world.size)))
    own = zigzag.rows_of_ranks(tokens, world.size, world.device)[world.rank]
    angles = cache(lambda data: Rotary(data.rotary.cos[own], data.rotary.sin[own]))

    def with_exchanges(data: Data) -> torch.Tensor:
        q, k, v = Unpacked.apply(F.linear(data.x, data.w_qkv), data.heads, angles(data))
        return F.linear(exchanging()(q, k, v), data.w_proj)

    in_zigzag = check_against(in_torchs_words(world, zigzag, tokens), data)
    without = check_against(partial(alone, world), data)
    yield {
        "te": Way(forward_backward(with_exchanges), check=in_zigzag),
        "te_alone": Way(forward_backward(lambda data: alone(world, data, inside())), check=without),
    }


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
    def forward(ctx, blocks: torch.Tensor, world: World) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.world = world
        return world.exchange(blocks)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[no-untyped-def]
        return ctx.world.exchange(grad.contiguous()), None


def exchange(x: torch.Tensor, world: World, to_heads: bool) -> torch.Tensor:
    """x [s/W, b, n] -> [s, b, n/W], or back: an all-to-all with the copy that makes blocks contiguous."""
    if to_heads:
        blocks = x.unflatten(-1, (world.size, -1)).movedim(2, 0).contiguous()
        return _Exchange.apply(blocks, world).flatten(0, 1)
    received = _Exchange.apply(x.unflatten(0, (world.size, -1)).contiguous(), world)
    return received.movedim(0, 2).flatten(2)
