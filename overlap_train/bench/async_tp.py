"""Linears on PyTorch's async-TP operators, with the dataflow of torchtitan/distributed/linear.py.

column  forward  y = all_gather(x) @ w.T, and 1/W of the gathered x's features are kept for backward
        backward dx = reduce_scatter(dy @ w), dw.T = all_gather(kept.T) @ dy
row     forward  y = reduce_scatter(x @ w.T)
        backward dx = all_gather(dy) @ w, dw = all_gather(dy).T @ x, with the dy gathered for dx
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .rivals import async_all_gather_matmul, async_matmul_reduce_scatter


class AsyncColumn(torch.autograd.Function):
    """x [M/W, K], w [N/W, K] -> y [M, N/W]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        gathered, y = async_all_gather_matmul(x, w.t(), group)
        kept = gathered.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()
        ctx.save_for_backward(kept, w)
        ctx.group = group
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        kept, w = ctx.saved_tensors
        dx = async_matmul_reduce_scatter(dy, w, ctx.group)
        _, dw_t = async_all_gather_matmul(kept.t().contiguous(), dy, ctx.group)
        return dx, dw_t.t().contiguous(), None


class AsyncRow(torch.autograd.Function):
    """x [M, K/W], w [N, K/W] -> y [M/W, N]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.group = group
        return async_matmul_reduce_scatter(x, w.t(), group)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, w = ctx.saved_tensors
        gathered, dx = async_all_gather_matmul(dy, w, ctx.group)
        return dx, torch.mm(gathered.t(), x, out_dtype=torch.float32).to(w.dtype), None
