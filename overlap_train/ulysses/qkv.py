"""The autograd function of qkv_all_to_all: y = all_to_all(x @ w.T), and the pass over y that makes q, k and v of it.

    forward    to_heads          x [M/W, K]    -> blocks in the slot -> q [s, b, query, dim], k and v [s, b, kv, dim]
    backward   heads_backward    dq, dk, dv    -> blocks that are sent -> dx [M/W, K], dw, dbias, gradients of the norms' weights

Heads are this rank's. HeadRows (rows.py) is the pass, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..linear import applied, as_rows, once_differentiable
from .attention_layout import HeadNorm, QkNorm, Rotary
from .exchange import Linear
from .layout import AttentionHeads
from .rows import HeadRows
from .two_groups import ShardedLinear


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
