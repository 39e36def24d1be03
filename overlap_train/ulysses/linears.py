"""The linears of Ulysses sequence parallelism, and their autograd functions: heads are sharded, and weights replicated or, over
a `tp_group`, divided.

    linear_all_to_all, qkv_all_to_all           forward  GEMM + A2A    dgrad  A2A(dy) + GEMM   wgrad  with the dy just received
    all_to_all_linear, attention_output_linear  forward  A2A(x) + GEMM dgrad  GEMM + A2A       wgrad  A2A(x), sent again or kept

W ranks; M global rows (the product of all leading dimensions, the first of which is the sequence); K input, N output features.
Source: DeepSpeed-Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..config import OverlapConfig
from ..linear import applied, as_a_whole, as_rows, once_differentiable
from ..ops.plan_cache import OnPlan, refuse
from ..ops.spec import (
    ALL_GATHER_LINEAR,
    ALL_TO_ALL_LINEAR,
    LINEAR_ALL_TO_ALL,
    LINEAR_REDUCE_SCATTER,
    OperatorSpec,
    refuse_non_tensors,
)
from .attention_layout import QkNorm, Rotary, rotated
from .exchange import HeadRows, Linear, RankRows, Rows, SequenceRows, Terms, heads_linear, like, rows_linear
from .layout import AttentionHeads, SequenceShards
from .two_groups import refuse_in_both, sharded_linear


@as_a_whole
def linear_all_to_all(
    x_shard_m: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    heads: AttentionHeads | None = None,
    config: OverlapConfig | None = None,
    name: str = "linear_all_to_all",
) -> torch.Tensor:
    """Linear on a sequence shard whose output is sharded by features instead: the QKV projection of Ulysses attention.

        x_shard_m  [M/W, K]   as [s/W, ..., K], first dimension sharded over the group
        w          [N, K]     the same on every rank
        bias       [N]        the same on every rank
        y_shard_n  [M, N/W] = all_to_all(x_shard_m @ w.T + bias), as [s, ..., N/W]: all rows, rank after rank
        dx_shard_m [M/W, K] = all_to_all(dy_shard_n) @ w
        dw         [N, K]   = all_to_all(dy_shard_n).T @ x_shard_m

    The gradients of w and bias are those of this rank's rows and columns; sum them over the group (data parallelism over the
    context-parallel group does).

    Args:
        heads: what w [N, K] consists of, where it is a QKV projection. It allows fewer KV heads than ranks: k and v of a head are
            then sent to every rank that needs them, y_shard_n is [M, (query / W + 2) * dim], and the gradients of their copies
            are summed in fp32, in a fixed order. None: N is split evenly.
        group, config, name: see all_gather_linear.

    Raises:
        ValueError, OverlapTimeoutError, RuntimeError: as all_gather_linear; N, or the query heads, cannot be divided by W.
    """
    refuse_non_tensors(name, {"x_shard_m": x_shard_m, "w": w})
    linear, own_bias = heads_linear(x_shard_m, w, bias, heads, group, Terms(config, name))
    world, n = linear.world_size, linear.w.shape[0]

    def rows(ys: tuple[torch.Tensor], _: None) -> Rows:
        return RankRows(ys[0].contiguous(), world, linear.batch)

    (y,) = _apply_to_heads(as_rows(x_shard_m), w, None, linear, [(world * linear.rows_of_rank, n // world)], rows)
    if x_shard_m.dim() > 2:
        y = y.view(-1, *x_shard_m.shape[1:-1], y.shape[-1])
    return y if own_bias is None else y + own_bias


@as_a_whole
def all_to_all_linear(
    x_shard_k: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    config: OverlapConfig | None = None,
    name: str = "all_to_all_linear",
) -> torch.Tensor:
    """Linear on an input that is sharded by features, whose output is a sequence shard: Ulysses' output projection.

        x_shard_k  [M, K/W]   as [s, ..., K/W], last dimension sharded over the group: all rows, rank after rank
        w          [N, K]     the same on every rank
        bias       [N]        the same on every rank
        y_shard_m  [M/W, N] = all_to_all(x_shard_k) @ w.T + bias, as [s/W, ..., N]
        dx_shard_k [M, K/W] = all_to_all(dy_shard_m @ w)
        dw         [N, K]   = dy_shard_m.T @ all_to_all(x_shard_k)

    The gradients of w and bias are those of this rank's rows; sum them over the group. What backward does about the received
    input, config.gathered_input says: it is sent again under the dgrad GEMM, or kept (M / W x K elements).

    Arguments, dtypes, errors: see all_gather_linear. The first dimension of x_shard_k must be divisible by W.
    """
    refuse_non_tensors(name, {"x_shard_k": x_shard_k})
    linear = rows_linear(x_shard_k, w, bias, group, Terms(config, name))
    rows = partial(RankRows, world_size=linear.world_size, batch=linear.batch)
    y = _apply_to_rows(as_rows(x_shard_k), w, linear, rows, False, torch.is_grad_enabled())
    if x_shard_k.dim() > 2:
        y = y.view(-1, *x_shard_k.shape[1:-1], y.shape[-1])
    return y if bias is None else y + bias


@as_a_whole
def qkv_all_to_all(
    x_shard_m: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    shards: SequenceShards,
    heads: AttentionHeads,
    qk_norm: QkNorm | None = None,
    rotary: Rotary | None = None,
    config: OverlapConfig | None = None,
    name: str = "linear_qkv",
    on_plan: OnPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The QKV projection of a Ulysses attention, ready for any attention over all rows and this rank's heads.

        x_shard_m  [s/W, b, K]   a sequence shard, or [lengths[r], b, K] on rank r
        w          [N, K]        Megatron's order: for each KV head its query heads, k, v; N = (query + 2 kv) dim
        bias       [N]
        q          [s, b, query/W, dim]
        k, v       [s, b, max(1, kv/W), dim]

    One pass takes what has arrived out of symmetric memory: it adds the bias, puts rows in order, splits q, k and v, and rotates
    q and k. Backward does the inverse on the way to what is sent. With `qk_norm` norm and rotation are passes of their own. Both
    are computed in fp32, and each is rounded to the dtype of x.

    With a `tp_group` of T ranks weights are divided over it, and x over both groups: x is one of T equal parts of this rank's
    shard, [s/(W T), b, K], w [N/T, K], bias [N/T], and heads are those of one tensor-parallel rank.

    Ranks may have different numbers of rows: `SequenceLayout(lengths=...)`, s = sum(lengths). Padding costs what rows cost.

    Args:
        shards: who has which rows; the same as of attention_output_linear.
        qk_norm: RMSNorm of each head of q and of k. The gradients of its weights are those of this rank's heads; sum them over
            the group, as that of the bias.
        rotary: cos and sin of the whole sequence, in its order; None: q and k as they are.
        heads, config, name: see linear_all_to_all.
        on_plan: see all_gather_linear. Of a sequence in parts it is told the plan of the first, under TP of its product.

    Raises:
        ValueError: as linear_all_to_all; the sequence does not fit the layout.
    """
    refuse_non_tensors(name, {"x_shard_m": x_shard_m, "w": w})
    wrong, s = shards.error(x_shard_m, False, name), shards.length(x_shard_m, is_whole=False)
    if wrong is None and rotary is not None:
        wrong = rotary.error(s, heads.dim, x_shard_m.device, name)
    if wrong is None and qk_norm is not None:
        wrong = qk_norm.error(x_shard_m.device, heads.dim, name)
    if wrong is not None:
        _refuse(wrong, LINEAR_ALL_TO_ALL, ALL_GATHER_LINEAR, shards, x_shard_m, config, name)
    x_shard_m = shards.padded(x_shard_m)
    meaning = [how.meaning for how in (qk_norm, rotary) if how is not None]
    terms = Terms(config, name, (shards.layout.meaning, *meaning), on_plan)
    if shards.tensor == 1:
        linear, own_bias = heads_linear(x_shard_m, w, bias, heads, shards.group, terms)
    else:
        linear, own_bias = sharded_linear(x_shard_m, w, bias, heads, shards, terms)
    own, order = heads.of_rank(shards.ranks), shards.rows(s, x_shard_m.device)
    rows = partial(HeadRows, order, rotary if qk_norm is None else None)
    shapes = [(s, x_shard_m.shape[1], count, own.dim) for count in (own.query, own.kv, own.kv)]
    q, k, v = _apply_to_heads(as_rows(x_shard_m), w, own_bias, linear, shapes, rows)
    if qk_norm is not None:
        q, k = qk_norm.of(q, qk_norm.q_weight), qk_norm.of(k, qk_norm.k_weight)
        if rotary is not None:
            q, k = (rotated(part, rotary, slice(None)) for part in (q, k))
    return q, k, v


@as_a_whole
def attention_output_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    shards: SequenceShards,
    config: OverlapConfig | None = None,
    name: str = "linear_proj",
    on_plan: OnPlan | None = None,
) -> torch.Tensor:
    """The output projection of a Ulysses attention: all_to_all_linear on the rows of a sequence that `shards` describes.

        x          [s, b, K/W]   the attention's output, in the order of the sequence
        w          [N, K]
        y_shard_m  [s/W, b, N]   a sequence shard, or [lengths[r], b, N] on rank r

    With a `tp_group` of T ranks x is [s, b, K/(W T)], w [N, K/T], and y [s/(W T), b, N]: the product scatters its sums over it.

    Arguments, errors: see qkv_all_to_all and all_to_all_linear.
    """
    refuse_non_tensors(name, {"x": x})
    wrong = shards.error(x, True, name)
    if wrong is not None:
        _refuse(wrong, ALL_TO_ALL_LINEAR, LINEAR_REDUCE_SCATTER, shards, x, config, name)
    layout, terms = shards.layout, Terms(config, name, (shards.layout.meaning,), on_plan)
    # A tensor to plan with: as many rows as are exchanged.
    sent = like(x, shards.ranks * shards.tensor * shards.longest, x.shape[-1]) if layout.lengths else x
    if shards.tensor == 1:
        linear = rows_linear(sent, w, bias, shards.group, terms)
    else:
        linear, _ = sharded_linear(sent, w, bias, None, shards, terms)
    is_padded = False
    rows: Callable[..., Rows] = partial(RankRows, world_size=shards.ranks, batch=linear.batch)
    if shards.tensor > 1 or not layout.is_in_turn:  # else nothing is to be copied
        is_padded = bool(layout.lengths)
        rows = partial(SequenceRows, rows=shards.rows(x.shape[0], x.device), is_padded=is_padded)
    y = _apply_to_rows(x, w, linear, rows, is_padded, torch.is_grad_enabled())
    y = shards.cut(y.view(-1, x.shape[1], w.shape[0]))
    return y if bias is None else y + bias


def _refuse(
    wrong: str, alone: OperatorSpec, product: OperatorSpec, shards: SequenceShards, x: torch.Tensor,
    config: OverlapConfig | None, name: str,
) -> NoReturn:  # fmt: skip
    """Raise ValueError(wrong); at the first call on every rank. alone: the operator of one group; product: of the TP group."""
    if shards.tensor > 1:
        refuse_in_both(wrong, product, shards, config, x.device, name)
    refuse(wrong, alone, shards.group, config, x.device, name)


class _ToHeads(torch.autograd.Function):
    """all_to_all(x @ w.T), in tensors of these shapes. rows: makes of these, or of their gradients, and of a bias that is added
    the Rows that are exchanged."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, linear: Linear,
        shapes: Sequence[tuple[int, ...]], rows: Callable[..., Rows],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        ys = tuple(linear.w.new_empty(shape) for shape in shapes)
        saved = linear.to_heads(x, rows(ys, bias))
        ctx.linear, ctx.rows = linear, rows
        ctx.save_for_backward(saved if ctx.needs_input_grad[1] else None, linear.w)
        return ys

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, w), dy, dbias = ctx.saved_tensors, ctx.rows(dys, None), None
        dy.sums = ctx.needs_input_grad[2]
        dx, dw = ctx.linear.multiplying(w, ctx).heads_backward(x, dy, ctx.needs_input_grad[0])
        if dy.sums:
            dbias = dy.total.to(w.dtype)
        return dx, dw, dbias, None, None, None


class _ToRows(torch.autograd.Function):
    """y = all_to_all(x) @ w.T. rows: makes of x, or dx, the Rows that are exchanged. trains: gradients are enabled."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, linear: Linear, rows: Callable[..., Rows], is_padded: bool, trains: bool,
    ) -> torch.Tensor:  # fmt: skip
        x = x.contiguous()
        y, kept = linear.to_rows(rows(x), linear.keeps and trains and w.requires_grad)
        ctx.linear, ctx.rows, ctx.is_padded, ctx.shape = linear, rows, is_padded, x.shape
        ctx.save_for_backward(*(kept or [x] if ctx.needs_input_grad[1] else [None]), linear.w)
        return y  # whole and not as a view, which autograd would refuse to have written into

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (*saved, w), dx, into, x = ctx.saved_tensors, None, None, None
        linear = ctx.linear.multiplying(w, ctx)
        if ctx.needs_input_grad[0]:
            dx = dy.new_empty(ctx.shape[0] + ctx.is_padded, *ctx.shape[1:])  # with the row of padding
            into, dx = ctx.rows(dx), dx[: ctx.shape[0]] if ctx.is_padded else dx
        if ctx.needs_input_grad[1]:
            x = saved if linear.keeps else ctx.rows(saved[0])
        return dx, linear.rows_backward(x, dy, into), None, None, None, None


_apply_to_heads, _apply_to_rows = applied(_ToHeads), applied(_ToRows)
