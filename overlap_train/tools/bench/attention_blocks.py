"""Whole attention blocks of Ulysses, forward and backward: projections, rotation, core attention, exchanges.

    x [s/W, 1, hidden] -> q, k, v of all rows -> causal attention -> y [s/W, 1, hidden]

Each rank holds an equal part of the sequence, in order. Beside ours: the same block with NCCL's all-to-all and the copies that it
needs (`sequence`), and the same work without any exchange (`alone`), which nobody can beat by hiding communication. All split and
rotate in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...operators.attention_layout import Heads, Rotary, pack, unpack
from ...planning.heads import AttentionHeads
from ...runtime.registry import check as check_timeouts
from ...ulysses.attention import attention_output_linear, qkv_all_to_all
from ..measure.models import Model
from ..measure.results import Row
from ..measure.runs import Session
from ..measure.timing import Call, Timing
from ..measure.world import World

Block = Callable[["Data"], torch.Tensor]
Outcome = tuple[torch.Tensor, ...]  # y, dx, dw_qkv, dw_proj


@dataclass(frozen=True)
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


def run(models: Sequence[tuple[str, Model]], tokens: Sequence[int], session: Session) -> list[Row]:
    """Measure every block; one row for each method that computes what torch's own operations do. Collective."""
    found = []
    for name, model in models:
        for number in tokens:
            rows = measure_block(name, model, number, session)
            session.results.add(rows)
            times = ", ".join(f"{row['method']} {row['ms']:.3f} ms" for row in rows)
            session.world.say(f"{name} attention, {number} tokens: {times or 'no result'}")
            found += rows
    return found


def measure_block(name: str, model: Model, tokens: int, session: Session) -> list[Row]:
    """Check, then time, every method and rival of one block."""
    settings, world, title = session.settings, session.world, f"{name} attention, {tokens} tokens"
    data = Data.make(model, tokens, world, settings.dtype, seed=0)
    rivals: dict[str, Block] = {"sequence": partial(by_nccl, world), "alone": partial(alone, world)}
    calls = {rival: forward_backward(block, data) for rival, block in rivals.items()}
    expected = cast(Outcome, forward_backward(partial(in_torchs_words, world), data)(0))
    check_outcome(calls["sequence"], expected)
    for method in settings.methods:
        call = forward_backward(partial(overlapped, session, method), data)
        problem = world.attempt(partial(check_outcome, call, expected))
        if problem is None:
            calls[method] = call
        else:
            session.results.note(f"{title}: {method}: {problem}", failure=True)
    flops = 6 * data.x.numel() * sum(w.shape[0] for w in (data.w_qkv, data.w_proj))
    timings = session.time(calls, flops)
    return [row(name, tokens, method, timings, world.size) for method in settings.methods if method in timings]


def overlapped(session: Session, method: str, data: Data) -> torch.Tensor:
    """Ours."""
    config, group = replace(session.settings.config, method=method), session.world.group
    q, k, v = qkv_all_to_all(data.x, data.w_qkv, group=group, heads=data.heads, rotary=data.rotary, config=config)
    return attention_output_linear(core_attention(q, k, v), data.w_proj, group=group, config=config)


def by_nccl(world: World, data: Data) -> torch.Tensor:
    """One QKV GEMM, one exchange, one pass that splits and rotates as ours does; one exchange, one GEMM."""
    y = exchange(F.linear(data.x, data.w_qkv), world.group, to_heads=True)
    out = core_attention(*_Unpacked.apply(y, data.heads.of_rank(world.size), data.rotary))
    return F.linear(exchange(out, world.group, to_heads=False), data.w_proj)


def in_torchs_words(world: World, data: Data) -> torch.Tensor:
    """The same by torch's own operations: what the results of all others must be."""
    y = exchange(F.linear(data.x, data.w_qkv), world.group, to_heads=True)
    out = core_attention(*rotated(*split(y, data.heads.of_rank(world.size)), data.rotary))
    return F.linear(exchange(out, world.group, to_heads=False), data.w_proj)


def alone(world: World, data: Data) -> torch.Tensor:
    """The same work on data in place: what a rank has is taken for what it would receive, which is as large."""
    y = F.linear(data.x, data.w_qkv).view(-1, 1, data.w_qkv.shape[0] // world.size)
    heads = data.heads.of_rank(world.size)
    out = core_attention(*_Unpacked.apply(y, heads, data.rotary))
    return F.linear(out.reshape(len(data.x), 1, -1), data.w_proj)


class _Unpacked(torch.autograd.Function):
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
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)
        return received

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


def forward_backward(block: Block, data: Data) -> Call:
    """The call that is timed; returns an Outcome."""
    leaves = [data.x, data.w_qkv, data.w_proj]

    def call(index: int) -> Outcome:
        y = block(data)
        with torch.autograd.set_multithreading_enabled(False):
            return (y.detach(), *torch.autograd.grad(y, leaves, data.dy))

    return call


def check_outcome(call: Call, expected: Outcome) -> None:
    """Run twice, then compare with the rival's: both round at other places, so by norms."""
    call(0)
    outcome = cast(Outcome, call(1))
    check_timeouts()
    tolerance = 8 * torch.finfo(expected[0].dtype).eps
    for name, ours, theirs in zip(("y", "dx", "dw_qkv", "dw_proj"), outcome, expected, strict=True):
        error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
        if not error <= tolerance:
            raise RuntimeError(
                f"{name} differs from torch's block by {error:.3g} of its norm; rounding explains {tolerance:.3g}"
            )


def row(name: str, tokens: int, method: str, timings: dict[str, Timing], world: int) -> Row:
    """One line of layers.json; times in milliseconds of one forward and backward, host_us in microseconds."""
    return {
        "layer": f"{name}-ulysses", "world": world, "seq": tokens, "method": method, "ms": timings[method].ms,
        "sequence_ms": timings["sequence"].ms, "alone_ms": timings["alone"].ms, "host_us": timings[method].host_us,
    }  # fmt: skip
