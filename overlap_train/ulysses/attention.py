"""The projections around a Ulysses attention: q, k and v of all rows and some heads, and back to a sequence shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ..config import OverlapConfig
from ..linear import as_rows, run_eagerly
from ..operators.attention_layout import Rotary
from ..planning.heads import AttentionHeads
from ..planning.sequence import SequenceLayout
from .exchange import Linear, Rows, heads_backward, rows_backward, to_heads, to_rows
from .linears import heads_linear, rank_rows, rows_linear
from .rows import HeadRows, SequenceRows

CONTIGUOUS = SequenceLayout()


def qkv_all_to_all(
    x_shard_m: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    heads: AttentionHeads,
    layout: SequenceLayout = CONTIGUOUS,
    rotary: Rotary | None = None,
    config: OverlapConfig | None = None,
    name: str = "linear_qkv",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The QKV projection of a Ulysses attention, ready for any attention over all rows and this rank's heads.

        x_shard_m  [s/W, b, K]   a sequence shard
        w          [N, K]        Megatron's order: for each KV head its query heads, k, v; N = (query + 2 kv) dim
        bias       [N]
        q          [s, b, query/W, dim]
        k, v       [s, b, max(1, kv/W), dim]

    One pass takes what has arrived out of symmetric memory: it adds the bias, undoes `layout`, splits q, k and v and rotates q
    and k. Backward does the inverse on the way to what is sent. Rotation is computed in fp32.

    Args:
        layout: how the ranks share the sequence.
        rotary: cos and sin of the whole sequence, in its order; None: q and k as they are (a model that normalises them first).
        heads, group, config, name: see linear_all_to_all.

    Raises:
        ValueError: as linear_all_to_all; the sequence does not fit the layout.
    """
    if torch.compiler.is_compiling():
        return run_eagerly(  # type: ignore[return-value]
            qkv_all_to_all, x_shard_m, w, bias, group=group, heads=heads, layout=layout, rotary=rotary, config=config, name=name
        )  # fmt: skip
    world_size = dist.get_world_size(group)
    s = x_shard_m.shape[:1].numel() * world_size
    error = _error(x_shard_m, s, layout, rotary, world_size, name) or _angles_error(rotary, heads, name)
    if error is not None:
        raise ValueError(error)
    meaning = layout.meaning + (", rotated" if rotary is not None else "")
    linear, own_bias = heads_linear(x_shard_m, w, bias, heads, group, config, name, meaning)
    rows = layout.rows_of_ranks(s, world_size, x_shard_m.device)
    return _QkvAllToAll.apply(x_shard_m, w, own_bias, linear, _Received(heads.of_rank(world_size), rows, rotary))


def attention_output_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    layout: SequenceLayout = CONTIGUOUS,
    config: OverlapConfig | None = None,
    name: str = "linear_proj",
) -> torch.Tensor:
    """The output projection of a Ulysses attention: all_to_all_linear behind `layout`.

        x          [s, b, K/W]   the attention's output, in the order of the sequence
        w          [N, K]
        y_shard_m  [s/W, b, N]   a sequence shard

    Arguments, errors: see qkv_all_to_all and all_to_all_linear.
    """
    if torch.compiler.is_compiling():
        return run_eagerly(attention_output_linear, x, w, bias, group=group, layout=layout, config=config, name=name)
    world_size = dist.get_world_size(group)
    error = _error(x, x.shape[:1].numel(), layout, None, world_size, name)
    if error is not None:
        raise ValueError(error)
    linear = rows_linear(x, w, bias, group, config, name, layout.meaning)
    rows = None if layout.kind == "contiguous" else layout.rows_of_ranks(x.shape[0], world_size, x.device)
    y = _OutputLinear.apply(x, w, linear, rows, torch.is_grad_enabled()).view(-1, x.shape[1], w.shape[0])
    return y if bias is None else y + bias


def _error(
    x: torch.Tensor, rows: int, layout: SequenceLayout, rotary: Rotary | None, world_size: int, name: str
) -> str | None:
    """What is wrong with x and what goes with it, or None. rows: of the whole sequence."""
    if not isinstance(layout, SequenceLayout):
        return f"{name}: layout={layout!r} must be a SequenceLayout, such as SequenceLayout('zigzag')"
    if not isinstance(rotary, Rotary | None):
        return f"{name}: rotary is a {type(rotary).__name__}; it must be Rotary(cos, sin), or None"
    if x.dim() != 3:
        return f"{name}: the input has shape {tuple(x.shape)}; it must be [sequence, batch, features]"
    if rotary is not None and (rotary.cos.shape != rotary.sin.shape or rotary.cos.shape[:-1].numel() != rows):
        shapes = f"cos {tuple(rotary.cos.shape)} and sin {tuple(rotary.sin.shape)}"
        return f"{name}: rotary has {shapes}; both must have a row for each of the {rows} rows of all ranks"
    return layout.error(rows, world_size, name)


def _angles_error(rotary: Rotary | None, heads: AttentionHeads, name: str) -> str | None:
    """What is wrong with the number of features that are rotated, or None."""
    if not isinstance(heads, AttentionHeads):
        return f"{name}: heads={heads!r} must be AttentionHeads(query=..., kv=..., dim=...)"
    rotated = 0 if rotary is None else rotary.cos.shape[-1]
    if rotated % 2 == 0 and rotated <= heads.dim:
        return None
    return f"{name}: rotary turns {rotated} features of each head, which has {heads.dim}; it must be an even number of them"


@dataclass(frozen=True)
class _Received:
    """What a rank receives, and how it becomes q, k and v.

    heads: of this rank. rows: int64 [W, s/W], which rows of the sequence each rank has sent.
    """

    heads: AttentionHeads
    rows: torch.Tensor
    rotary: Rotary | None


class _QkvAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_shard_m: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        linear: Linear,
        received: _Received,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, x_rows, (s, b) = received.heads, as_rows(x_shard_m), (received.rows.numel(), x_shard_m.shape[1])
        q, k, v = (x_rows.new_empty(s, b, count, heads.dim) for count in (heads.query, heads.kv, heads.kv))
        to_heads(linear, x_rows, HeadRows((q, k, v), received.rows, received.rotary, bias))
        ctx.linear, ctx.received = linear, received
        ctx.save_for_backward(x_rows if ctx.needs_input_grad[1] else None, linear.w)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None]:
        dy = HeadRows((dq, dk, dv), ctx.received.rows, ctx.received.rotary, None)
        if ctx.needs_input_grad[2]:
            dy.bias_gradient = dq.new_zeros(ctx.received.heads.features, dtype=torch.float32)
        x_rows, w = ctx.saved_tensors
        dx, dw = heads_backward(ctx.linear.multiplying(w), x_rows, dy, ctx.needs_input_grad[0])
        dbias = None if dy.bias_gradient is None else dy.bias_gradient.to(dq.dtype)
        return None if dx is None else dx.view(-1, dq.shape[1], dx.shape[-1]), dw, dbias, None, None


def _sequence(linear: Linear, x: torch.Tensor, rows: torch.Tensor | None) -> Rows:
    """x [s, b, C] as the exchange finds it. rows: None where the ranks' rows follow each other, and nothing is to be copied."""
    return rank_rows(linear, x.flatten(0, 1)) if rows is None else SequenceRows(x, rows)


class _OutputLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, linear: Linear, rows: torch.Tensor | None, trains: bool
    ) -> torch.Tensor:
        x = x.contiguous()
        y, kept = to_rows(linear, _sequence(linear, x, rows), linear.keeps and trains and w.requires_grad)
        ctx.linear, ctx.rows, ctx.shape = linear, rows, x.shape
        ctx.save_for_backward(*(kept or [x] if ctx.needs_input_grad[1] else [None]), linear.w)
        return y  # whole and not as a view, which autograd would refuse to have written into

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        *saved, w = ctx.saved_tensors
        linear = ctx.linear.multiplying(w)
        dx = dy.new_empty(ctx.shape) if ctx.needs_input_grad[0] else None
        into = None if dx is None else _sequence(linear, dx, ctx.rows)
        x = None
        if ctx.needs_input_grad[1]:
            x = saved if linear.keeps else _sequence(linear, saved[0], ctx.rows)
        return dx, rows_backward(linear, x, dy, into), None, None, None
