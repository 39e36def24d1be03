"""Whole attention blocks of Ulysses, forward and backward: projections, rotation, core attention, exchanges.

    x [s/W, 1, hidden] -> q, k, v of all rows -> causal attention -> y [s/W, 1, hidden]        dx, dw_qkv, dw_proj from dy

Each rank holds an equal part of the sequence, in order. Beside ours, by name:

    sequence  the same block with NCCL's all-to-all and the copies that it needs
    alone     the same work without any exchange, which nobody can beat by hiding communication
    te        TransformerEngine's attention with its own exchanges (context parallelism by `a2a`)
    te_alone  its attention of this rank's heads and all rows, without exchanges

All split and rotate in one pass. TransformerEngine takes it that each rank holds two chunks of the sequence, a zigzag. So x is
read as such rows there, and the result must be that of torch's block on the same rows. Its core attention is cuDNN's or
FlashAttention's, that of all others torch's: te / te_alone and ms / alone say what the exchanges cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...config import OverlapConfig
from ...group.registry import check as check_timeouts
from ...ulysses.attention import attention_output_linear, qkv_all_to_all
from ...ulysses.attention_layout import Heads, Rotary, pack, unpack
from ...ulysses.layout import AttentionHeads, SequenceLayout
from ...ulysses.shards import SequenceShards
from ..measure.models import Model
from ..measure.operands import all_to_all
from ..measure.results import Row
from ..measure.runs import Session
from ..measure.timing import Call, Timing
from ..measure.world import World
from . import transformer_engine

Block = Callable[["Data"], torch.Tensor]
Outcome = tuple[torch.Tensor, ...]  # y, dx, dw_qkv, dw_proj
NAMES = ("y", "dx", "dw_qkv", "dw_proj")
TILE = 128  # rows and columns; no kernel of ours has larger tiles in both


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


def forward_backward(block: Block, data: Data) -> Call:
    """The call that is timed; returns an Outcome."""
    leaves = [data.x, data.w_qkv, data.w_proj]

    def call(index: int) -> Outcome:
        y = block(data)
        with torch.autograd.set_multithreading_enabled(False):
            return (y.detach(), *torch.autograd.grad(y, leaves, data.dy))

    return call


def check_block(block: Block, data: Data, decoy: Data, expected: Outcome) -> None:
    """Run twice on other inputs, so that whatever is left in slots and freed memory is wrong, then compare all results with the
    baseline's. Raises RuntimeError."""
    other = forward_backward(block, decoy)
    for index in range(2):
        other(index)
    check_outcome(cast(Outcome, forward_backward(block, data)(0)), expected)


def check_outcome(outcome: Outcome, expected: Outcome) -> None:
    """Both round at other places: of 2048 and 4096 tokens of two CPU ranks in bf16 no tile differs by more than 0.01."""
    check_timeouts()
    tolerance = 8 * torch.finfo(expected[0].dtype).eps
    for name, ours, theirs in zip(NAMES, outcome, expected, strict=True):
        error = worst_tile(ours, theirs)
        if not error <= tolerance:
            raise RuntimeError(
                f"{name} differs from torch's block by {error:.3g} of the norm of a tile; rounding explains {tolerance:.3g}"
            )


def worst_tile(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference in a tile of TILE x TILE elements, over the norm that theirs has there, or has in an average tile
    where that is more. Over the norm of the whole, a missing tile of 4096 x 4096 elements would be 0.03."""
    errors, norms = [], []
    for mine, other in zip(*(x.flatten(0, -2).split(32 * TILE) for x in (ours, theirs)), strict=True):
        errors.append(_norms_of_tiles(mine.double() - other.double()))
        norms.append(_norms_of_tiles(other.double()))
    error, norm = torch.cat(errors), torch.cat(norms)
    return float((error / norm.clamp_min(norm.square().mean().sqrt())).max())


def _norms_of_tiles(x: torch.Tensor) -> torch.Tensor:
    """x [rows, columns] -> [tiles, tiles]."""
    return F.avg_pool2d(x.square()[None, None], TILE, ceil_mode=True, divisor_override=1)[0, 0].sqrt()


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


ZIGZAG = SequenceLayout("zigzag")


def te_exchanging(te: Any, world: World, data: Data) -> Block:
    """The baseline `te`: TransformerEngine's attention with its own exchanges."""
    attention, tokens = _te_attention(te, data.heads), len(data.x) * world.size
    stream = torch.cuda.Stream() if world.device.type == "cuda" else None  # where it reorders what has arrived
    ranks = dist.get_process_group_ranks(world.group)
    attention.set_context_parallel_group(world.group, ranks, stream, "a2a")
    own = ZIGZAG.rows_of_ranks(tokens, world.size, world.device)[world.rank]
    angles = Rotary(data.rotary.cos[own], data.rotary.sin[own])

    def block(data: Data) -> torch.Tensor:
        q, k, v = Unpacked.apply(F.linear(data.x, data.w_qkv), data.heads, angles)
        return F.linear(attention(q, k, v), data.w_proj)

    return block


def te_alone(te: Any, world: World, data: Data) -> Block:
    """The baseline `te_alone`: what a rank has is taken for what it would receive, as in `alone`."""
    heads = data.heads.of_rank(world.size)
    attention = _te_attention(te, heads)

    def block(data: Data) -> torch.Tensor:
        y = F.linear(data.x, data.w_qkv).view(-1, 1, data.w_qkv.shape[0] // world.size)
        out = attention(*Unpacked.apply(y, heads, data.rotary))
        return F.linear(out.reshape(len(data.x), 1, -1), data.w_proj)

    return block


def _te_attention(te: Any, heads: AttentionHeads) -> Any:
    return te.DotProductAttention(
        heads.query,
        heads.dim,
        num_gqa_groups=heads.kv,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
    )


BASELINES = ("sequence", "alone", "te", "te_alone")


def run(models: Sequence[tuple[str, Model]], tokens: Sequence[int], session: Session) -> None:
    """Measure every block; one row for each method that computes what torch's own operations do. Collective."""
    for name, model in models:
        for number in tokens:
            data, decoy = (Data.make(model, number, session.world, session.settings.dtype, seed) for seed in (0, 99))
            rows = measure_block(Case(name, number, data, decoy, session))
            session.world.say(f"{name} attention, {number} tokens: {session.results.outcome(rows)}")


@dataclass(frozen=True)
class Case:
    """One block to measure. decoy: data as large, with other numbers."""

    name: str
    tokens: int
    data: Data
    decoy: Data
    session: Session

    def note(self, name: str, problem: str, failure: bool) -> None:
        self.session.results.note(f"{self.name} attention, {self.tokens} tokens: {name}: {problem}", failure)

    def rows(self, calls: Mapping[str, Call]) -> list[Row]:
        """All calls in turns; a row for each method of ours."""
        data, session = self.data, self.session
        timings = session.time(calls, 6 * data.x.numel() * sum(w.shape[0] for w in (data.w_qkv, data.w_proj)))
        methods = [method for method in session.settings.methods if method in timings]
        return [row(self.name, self.tokens, method, timings, session.world.size) for method in methods]


def measure_block(case: Case) -> list[Row]:
    """Check, then time, every method and baseline of one block; its rows, which are saved."""
    data, session, world = case.data, case.session, case.session.world
    baselines: dict[str, Block] = {"sequence": partial(by_nccl, world), "alone": partial(alone, world)}
    calls = {baseline: forward_backward(block, data) for baseline, block in baselines.items()}
    expected = expected_of(partial(in_torchs_words, world, SequenceLayout()), data)
    check_block(baselines["sequence"], data, case.decoy, expected)
    for method in session.settings.methods:
        config = replace(session.settings.config, method=method)
        block = partial(overlapped, config, world.group)
        problem = world.attempt(partial(check_block, block, data, case.decoy, expected))
        if problem is None:
            calls[method] = forward_backward(block, data)
        else:
            case.note(method, problem, failure=True)
    began = time.monotonic()
    rows = case.rows(calls)
    session.results.add(rows)
    took = time.monotonic() - began
    if rows and (te := transformer_engine.load(session)):
        with transformer_engine.limited(took):
            rows = with_te(te, calls, case)
    return rows


def with_te(te: Any, calls: Mapping[str, Call], case: Case) -> list[Row]:
    """The rows of all calls once more, with TransformerEngine's attention among them; saved instead of those of before."""
    world, found = case.session.world, dict(calls)
    in_zigzag = partial(in_torchs_words, world, ZIGZAG)
    baselines = {"te": (te_exchanging, in_zigzag), "te_alone": (te_alone, partial(alone, world))}
    for name, (make, same) in baselines.items():
        problem = world.attempt(partial(_add, found, name, partial(make, te, world), same, case))
        if problem is not None:
            found.pop(name, None)  # on some ranks it may have worked
            case.note(name, problem, failure=False)
    rows = case.rows(found)
    case.session.results.revise(rows)
    return rows


def _add(calls: dict[str, Call], name: str, make: Callable[[Data], Block], same: Block, case: Case) -> None:
    """A block's call, after a check against another that computes the same."""
    block = make(case.data)
    check_block(block, case.data, case.decoy, expected_of(same, case.data))
    calls[name] = forward_backward(block, case.data)


def expected_of(block: Block, data: Data) -> Outcome:
    return cast(Outcome, forward_backward(block, data)(0))


def overlapped(config: OverlapConfig, group: dist.ProcessGroup, data: Data) -> torch.Tensor:
    """One attention block by our operators."""
    shards = SequenceShards(group)
    q, k, v = qkv_all_to_all(data.x, data.w_qkv, shards=shards, heads=data.heads, rotary=data.rotary, config=config)
    return attention_output_linear(core_attention(q, k, v), data.w_proj, shards=shards, config=config)


def by_nccl(world: World, data: Data) -> torch.Tensor:
    """One attention block by NCCL: one QKV GEMM, one exchange, one pass that splits and rotates as ours does; one exchange, one
    GEMM."""
    y = exchange(F.linear(data.x, data.w_qkv), world.group, to_heads=True)
    out = core_attention(*Unpacked.apply(y, data.heads.of_rank(world.size), data.rotary))
    return F.linear(exchange(out, world.group, to_heads=False), data.w_proj)


def alone(world: World, data: Data) -> torch.Tensor:
    """One attention block without communication. What a rank has is taken for what it would receive, which is as large."""
    y = F.linear(data.x, data.w_qkv).view(-1, 1, data.w_qkv.shape[0] // world.size)
    heads = data.heads.of_rank(world.size)
    out = core_attention(*Unpacked.apply(y, heads, data.rotary))
    return F.linear(out.reshape(len(data.x), 1, -1), data.w_proj)


def row(name: str, tokens: int, method: str, timings: Mapping[str, Timing], world: int) -> Row:
    """One line of layers.json; times in milliseconds of one forward and backward, host_us in microseconds."""
    baselines = {f"{baseline}_ms": timings[baseline].ms if baseline in timings else None for baseline in BASELINES}
    return {
        "layer": f"{name}-ulysses", "world": world, "seq": tokens, "method": method, "ms": timings[method].ms, **baselines,
        "host_us": timings[method].host_us,
    }  # fmt: skip
