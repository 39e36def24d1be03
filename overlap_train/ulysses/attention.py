"""The projections around a Ulysses attention: q, k and v of all rows and some heads, and back to a sequence shard.

    forward    to_heads          x [M/W, K]    -> blocks in the slot -> q [s, b, query, dim], k and v [s, b, kv, dim]
    backward   heads_backward    dq, dk, dv    -> blocks that are sent -> dx [M/W, K], dw, dbias, gradients of the norms' weights

Heads are this rank's. HeadRows (rows.py) is the pass between slot and heads, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ..config import OverlapConfig
from ..linear import applied, as_rows, once_differentiable, run_eagerly
from ..ops.plan_cache import OnPlan, refuse
from ..ops.spec import ALL_GATHER_LINEAR, ALL_TO_ALL_LINEAR, LINEAR_ALL_TO_ALL, LINEAR_REDUCE_SCATTER, OperatorSpec
from .attention_layout import HeadNorm, QkNorm, Rotary
from .calls import Terms, heads_error, heads_linear, lengths_error, rows_linear, sequence_error
from .exchange import Linear
from .layout import AttentionHeads, SequenceLayout
from .linears import apply_to_rows
from .rows import HeadRows
from .shards import SequenceShards, shards_error
from .two_groups import ShardedLinear, refuse_in_both, sharded_heads_linear, sharded_rows_linear


@dataclass(frozen=True)
class Received:
    """How what a rank receives becomes q, k and v.

    heads: this rank's. s: rows of the sequence. rows: which of them each rank sends (shards.py). trains: whether gradients are
    enabled.
    """

    heads: AttentionHeads
    s: int
    rows: torch.Tensor
    norm: QkNorm | None
    rotary: Rotary | None
    trains: bool

    def new_heads(self, x: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        """Memory for [s, b, *counts, dim]; x: [*, b, K]."""
        return x.new_empty(self.s, x.shape[1], *counts, self.heads.dim)


class _QkvAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_shard_m: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        linear: Linear | ShardedLinear,
        received: Received,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, x_rows, before, norm = received.heads, as_rows(x_shard_m), None, None
        q, k, v = (received.new_heads(x_shard_m, (count,)) for count in (heads.query, heads.kv, heads.kv))
        if received.norm is not None:
            if received.trains and any(ctx.needs_input_grad):
                before = received.new_heads(x_shard_m, (heads.kv, heads.per_group + 1))
            norm = HeadNorm(received.norm, before)
        saved = linear.to_heads(x_rows, HeadRows((q, k, v), received.rows, received.rotary, bias, norm))
        ctx.linear, ctx.received = linear, received
        ctx.save_for_backward(saved if ctx.needs_input_grad[1] else None, linear.w, before, q_weight, k_weight)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_rows, w, before, *norm_weights = ctx.saved_tensors
        received, norm, dbias, of_norm = ctx.received, None, None, (None, None)
        if received.norm is not None:
            norm = HeadNorm(received.norm.having(*norm_weights), before)
        dy = HeadRows((dq, dk, dv), received.rows, received.rotary, None, norm)
        if ctx.needs_input_grad[2]:
            dy.bias_gradient = dq.new_zeros(received.heads.features, dtype=torch.float32)
        dx, dw = ctx.linear.multiplying(w).heads_backward(x_rows, dy, ctx.needs_input_grad[0])
        if dy.bias_gradient is not None:
            dbias = dy.bias_gradient.to(dq.dtype)
        if norm is not None:
            of_norm = norm.of_weights()
        return None if dx is None else dx.view(-1, dq.shape[1], dx.shape[-1]), dw, dbias, *of_norm, None, None


apply_qkv = applied(_QkvAllToAll)


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

    One pass takes what has arrived out of symmetric memory: it adds the bias, puts rows in order, splits q, k and v, normalises
    and rotates q and k. Backward does the inverse on the way to what is sent. Norm and rotation are computed in fp32, and each is
    rounded to the dtype of x, as separate passes would.

    For backward, `qk_norm` keeps q and k as they are before the norm: s x b x (query + kv) / W x dim elements, as many as a
    separate norm. (They cannot be worked out from its results, which may be written into, and whose weights may be 0.)

    With a `tp_group` of T ranks weights are divided over it, and x over both groups: x is one of T equal parts of this rank's
    shard, [s/(W T), b, K], w [N/T, K], bias [N/T], and heads are those of one tensor-parallel rank. The product gathers x over
    `tp_group`. A long sequence passes in parts; the product of one hides the exchange of another.

    Ranks may have different numbers of rows: `SequenceLayout(lengths=...)`, s = sum(lengths). Each shard is then padded to the
    longest one, and padding is multiplied and sent as rows are: 6000 and 2000 rows on two ranks cost what 12000 rows cost.

    Args:
        shards: who has which rows; the same as of attention_output_linear.
        qk_norm: RMSNorm of each head of q and of k. The gradients of its weights are those of this rank's heads, added in fp32
            and in a fixed order; sum them over the group, as that of the bias.
        rotary: cos and sin of the whole sequence, in its order; None: q and k as they are.
        heads, config, name: see linear_all_to_all.
        on_plan: see all_gather_linear. Of a sequence in parts it is told the plan of the first, under TP of its product.

    Raises:
        ValueError: as linear_all_to_all; the sequence does not fit the layout.
    """
    if torch.compiler.is_compiling():
        return run_eagerly(  # type: ignore[return-value]
            qkv_all_to_all, x_shard_m, w, bias, shards=shards, heads=heads, qk_norm=qk_norm, rotary=rotary,
            config=config, name=name, on_plan=on_plan,
        )  # fmt: skip
    wrong = shards_error(shards, name)
    if wrong is not None:
        raise ValueError(wrong)
    rows = x_shard_m.shape[:1].numel() * shards.ranks * shards.tensor
    wrong = sequence_error(x_shard_m, rows, shards.layout, rotary, shards.ranks, name)
    wrong = wrong or lengths_error(x_shard_m, shards.layout, shards.rank, shards.tensor, name)
    wrong = wrong or heads_error(x_shard_m, heads, qk_norm, rotary, name)
    if wrong is not None:
        _refuse(wrong, LINEAR_ALL_TO_ALL, ALL_GATHER_LINEAR, shards, x_shard_m, Terms(config, name))
    x_shard_m, s = shards.padded(x_shard_m), sum(shards.layout.lengths) or rows
    terms = Terms(config, name, _meaning(shards.layout, qk_norm, rotary), on_plan)
    linear: Linear | ShardedLinear
    if shards.both is None:
        linear, own_bias = heads_linear(x_shard_m, w, bias, heads, shards.group, terms)
    else:
        linear, own_bias = sharded_heads_linear(x_shard_m, w, bias, heads, shards.both, terms)
    of_ranks = shards.rows(s, x_shard_m.device)
    received = Received(heads.of_rank(shards.ranks), s, of_ranks, qk_norm, rotary, torch.is_grad_enabled())
    norm_weights = (None, None) if qk_norm is None else (qk_norm.q_weight, qk_norm.k_weight)
    return apply_qkv(x_shard_m, w, own_bias, *norm_weights, linear, received)


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
    if torch.compiler.is_compiling():
        return run_eagerly(  # type: ignore[return-value]
            attention_output_linear, x, w, bias, shards=shards, config=config, name=name, on_plan=on_plan
        )
    wrong = shards_error(shards, name)
    if wrong is not None:
        raise ValueError(wrong)
    wrong = sequence_error(x, x.shape[:1].numel(), shards.layout, None, shards.ranks, name)
    wrong = wrong or lengths_error(x, shards.layout, None, shards.tensor, name)
    if wrong is not None:
        _refuse(wrong, ALL_TO_ALL_LINEAR, LINEAR_REDUCE_SCATTER, shards, x, Terms(config, name))
    sent, terms = shards.as_sent(x), Terms(config, name, (shards.layout.meaning,), on_plan)
    linear: Linear | ShardedLinear
    if shards.both is None:
        linear = rows_linear(sent, w, bias, shards.group, terms)
    else:
        linear = sharded_rows_linear(sent, w, bias, shards.both, terms)
    finder = shards.finder(linear, x.shape[0], x.device)
    y = apply_to_rows(x, w, linear, finder, torch.is_grad_enabled())
    y = shards.cut(y.view(-1, x.shape[1], w.shape[0]))
    return y if bias is None else y + bias


def _refuse(
    wrong: str, alone: OperatorSpec, product: OperatorSpec, shards: SequenceShards, x: torch.Tensor, terms: Terms
) -> NoReturn:
    """Raise ValueError(wrong); at the first call on every rank. alone: the operator of one group; product: of the TP group."""
    if shards.both is not None:
        refuse_in_both(wrong, product, shards.both, terms.config, x.device, terms.name)
    refuse(wrong, alone, shards.group, terms.config, x.device, terms.name)


def _meaning(layout: SequenceLayout, qk_norm: QkNorm | None, rotary: Rotary | None) -> tuple[str, ...]:
    """How ranks must understand each other's rows: those that would do something else with them are told apart."""
    return (layout.meaning, *(how.meaning for how in (qk_norm, rotary) if how is not None))
