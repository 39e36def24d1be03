"""PyTorch's async-TP: its two operators, and linears on them with the dataflow of torchtitan/distributed/linear.py.

column  forward  y = all_gather(x) @ w.T, and 1/W of the gathered x's features are kept for backward
        backward dx = reduce_scatter(dy @ w), dw.T = all_gather(kept.T) @ dy
row     forward  y = reduce_scatter(x @ w.T)
        backward dx = all_gather(dy) @ w, dw = all_gather(dy).T @ x, with the dy gathered for dx
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


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


def async_all_gather_matmul(
    a_shard: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """a_shard [M/W, K], b [K, N] -> all_gather(a_shard) [M, K] and its product with b.

    The gathered input is returned, as a backward needs it; without it PyTorch may choose a path over NVLink multicast.
    """
    _load(a_shard)
    gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(a_shard, [b], 0, group.group_name)
    return gathered, products[0]


def async_matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """a [M, K/W], b [K/W, N] -> reduce_scatter(a @ b) [M/W, N]."""
    _load(a)
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, group.group_name)


def _load(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cuda":
        raise RuntimeError("PyTorch's async-TP needs CUDA devices")
    import torch.distributed._symmetric_memory  # noqa: F401  registers the operators
