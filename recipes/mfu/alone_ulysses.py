"""Ulysses' projections without their all-to-alls: cuBLAS, and the passes between what is exchanged and what attention takes.

What a rank sends has as many elements as what it receives, so the one stands for the other. W: context-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from overlap_train import Rotary
from overlap_train.integrations.megatron.linears.exchange import Exchange
from overlap_train.integrations.megatron.linears.ulysses import UlyssesColumnParallelLinear, UlyssesRowParallelLinear
from overlap_train.operators.attention_layout import Heads, pack, unpack
from overlap_train.operators.weight_gradient import weight_gradient


class _ToHeads(torch.autograd.Function):
    """x [s/W, b, K], w [N, K] -> q [s, b, query/W, dim], k, v [s, b, kv/W, dim]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, exchange: Exchange, rotary: Rotary | None, main_grad: str
    ) -> Heads:
        heads, s, b = exchange.heads.of_rank(exchange.ranks), len(exchange.order), x.shape[1]
        ctx.save_for_backward(x, w)
        ctx.exchange, ctx.rotary, ctx.main_grad = exchange, rotary, main_grad
        q, k, v = (x.new_empty(s, b, count, heads.dim) for count in (heads.query, heads.kv, heads.kv))
        packed = (x.flatten(0, 1) @ w.t()).view(s, b, -1)
        unpack(packed, None, exchange.order, (q, k, v), rotary)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None]:
        x, w = ctx.saved_tensors
        packed = pack(dy, ctx.exchange.order, ctx.rotary).view(x.shape[:-1].numel(), -1)  # type: ignore[arg-type]
        dw = weight_gradient(packed, x.flatten(0, 1), w, ctx.main_grad)
        return (packed @ w).view_as(x), dw, None, None, None


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

    def to_heads(self, x: torch.Tensor, exchange: Exchange, rotary: Rotary | None) -> Heads:  # type: ignore[override]
        copies = exchange.heads.sent_rows(exchange.ranks, self.weight.device)
        if copies is None:
            return _ToHeads.apply(x, self.weight, exchange, rotary, self.wholes.main_grad)
        return _ToHeads.apply(x, self.weight.index_select(0, copies), exchange, rotary, "off")


class SequenceAlone(UlyssesRowParallelLinear):
    """Stands in for the linear_proj of a Ulysses attention, given `wholes`."""

    def reason(self, x: torch.Tensor, exchange: Exchange) -> None:  # type: ignore[override]
        """Every call is this one."""

    def to_sequence(self, x: torch.Tensor, exchange: Exchange) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _ToSequence.apply(x.contiguous(), self.weight, exchange, self.wholes.main_grad), None
