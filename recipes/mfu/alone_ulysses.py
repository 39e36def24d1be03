"""Ulysses' projections without their all-to-alls: cuBLAS, and the passes between what is exchanged and what attention takes.

What a rank sends has as many elements as what it receives, so the one stands for the other. W: context-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from overlap_train import QkNorm, Rotary
from overlap_train.integrations.megatron.linears.exchange import Exchange
from overlap_train.integrations.megatron.linears.ulysses import UlyssesColumnParallelLinear, UlyssesRowParallelLinear
from overlap_train.ops.wgrad import weight_gradient
from overlap_train.ulysses.attention_layout import HeadNorm, Heads, pack, unpack


class _ToHeads(torch.autograd.Function):
    """x [s/W, b, K], w [N, K] -> q [s, b, query/W, dim], k, v [s, b, kv/W, dim]. norm_weights: those of `norm`, or none."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, exchange: Exchange, norm: QkNorm | None, rotary: Rotary | None,
        main_grad: str, *norm_weights: torch.Tensor,
    ) -> Heads:  # fmt: skip
        heads, s, b = exchange.heads.of_rank(exchange.ranks), len(exchange.order), x.shape[1]
        before = None if norm is None else x.new_empty(s, b, heads.kv, heads.per_group + 1, heads.dim)
        ctx.save_for_backward(x, w, before, *norm_weights)
        ctx.exchange, ctx.norm, ctx.rotary, ctx.main_grad = exchange, norm, rotary, main_grad
        q, k, v = (x.new_empty(s, b, count, heads.dim) for count in (heads.query, heads.kv, heads.kv))
        packed = (x.flatten(0, 1) @ w.t()).view(s, b, -1)
        unpack(packed, None, exchange.order, (q, k, v), rotary, None if norm is None else HeadNorm(norm, before))
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w, before, *norm_weights = ctx.saved_tensors
        norm = None if ctx.norm is None else HeadNorm(ctx.norm.having(*norm_weights), before)
        packed = pack(dy, ctx.exchange.order, ctx.rotary, norm).view(x.shape[:-1].numel(), -1)  # type: ignore[arg-type]
        dw = weight_gradient(packed, x.flatten(0, 1), w, ctx.main_grad)
        return (packed @ w).view_as(x), dw, None, None, None, None, *(() if norm is None else norm.of_weights())


class _ToSequence(torch.autograd.Function):
    """x [s, b, K/W], w [N, K] -> [s/W, b, N]. Backward takes the rows of x out of the sequence again, as regathering does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, exchange: Exchange, main_grad: str) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.exchange, ctx.main_grad = exchange, main_grad
        y = _sent(x, w, exchange) @ w.t()
        return y.view(-1, x.shape[1], len(w))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        x, w = ctx.saved_tensors
        rows, dx = dy.flatten(0, 1), torch.empty_like(x)
        dw = weight_gradient(rows, _sent(x, w, ctx.exchange), w, ctx.main_grad)
        dx[ctx.exchange.order] = (rows @ w).view_as(x)
        return dx, dw, None, None


def _sent(x: torch.Tensor, w: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """[s/W b, K] of x [s, b, K/W]."""
    return x.index_select(0, exchange.order).view(-1, w.shape[1])


class HeadsAlone(UlyssesColumnParallelLinear):
    """Stands in for the linear_qkv of a Ulysses attention, given `wholes`."""

    def reason(self, x: torch.Tensor, exchange: Exchange) -> None:  # type: ignore[override]
        """Every call is this one."""

    def to_heads(self, x: torch.Tensor, exchange: Exchange, norm: QkNorm | None, rotary: Rotary | None) -> Heads:
        copies = exchange.heads.sent_rows(exchange.ranks, self.weight.device)
        norm_weights = () if norm is None else (norm.q_weight, norm.k_weight)
        if copies is None:
            return _ToHeads.apply(x, self.weight, exchange, norm, rotary, self.wholes.main_grad, *norm_weights)
        sent = self.weight.index_select(0, copies)
        return _ToHeads.apply(x, sent, exchange, norm, rotary, "off", *norm_weights)


class SequenceAlone(UlyssesRowParallelLinear):
    """Stands in for the linear_proj of a Ulysses attention, given `wholes`."""

    def reason(self, x: torch.Tensor, exchange: Exchange) -> None:  # type: ignore[override]
        """Every call is this one."""

    def to_rows(self, x: torch.Tensor, exchange: Exchange) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _ToSequence.apply(x.contiguous(), self.weight, exchange, self.wholes.main_grad), None
