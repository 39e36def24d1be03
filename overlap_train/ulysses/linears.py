"""The linears of Ulysses sequence parallelism, and their autograd functions: weights are replicated, heads are sharded.

    linear_all_to_all        forward  GEMM + A2A          dgrad  A2A(dy) + GEMM       wgrad  with the dy just received
    all_to_all_linear        forward  A2A(x) + GEMM       dgrad  GEMM + A2A           wgrad  A2A(x), sent again or kept

W ranks; M global rows (the product of all leading dimensions, the first of which is the sequence); K input, N output features.
Source: DeepSpeed-Ulysses (arXiv 2309.14509) for the all-to-alls around attention; linear.py for how passes overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..config import OverlapConfig
from ..linear import applied, as_rows, once_differentiable, run_eagerly
from .calls import Terms, heads_linear, rows_linear
from .exchange import Linear
from .layout import AttentionHeads
from .rows import RankRows, Rows
from .two_groups import ShardedLinear


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

    Returns:
        y_shard_n in the dtype of x_shard_m; products are accumulated in fp32.

    Raises:
        ValueError: as all_gather_linear; N, or the query heads, cannot be divided by W.
        OverlapTimeoutError, RuntimeError: as all_gather_linear.
    """
    if torch.compiler.is_compiling():
        return run_eagerly(linear_all_to_all, x_shard_m, w, bias, group=group, heads=heads, config=config, name=name)
    linear, own_bias = heads_linear(x_shard_m, w, bias, heads, group, Terms(config, name))
    y = _apply_linear_all_to_all(as_rows(x_shard_m), w, linear)
    if x_shard_m.dim() > 2:
        y = y.view(-1, *x_shard_m.shape[1:-1], y.shape[-1])
    return y if own_bias is None else y + own_bias


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
    if torch.compiler.is_compiling():
        return run_eagerly(all_to_all_linear, x_shard_k, w, bias, group=group, config=config, name=name)
    linear = rows_linear(x_shard_k, w, bias, group, Terms(config, name))
    y = apply_to_rows(as_rows(x_shard_k), w, linear, partial(rank_rows, linear), torch.is_grad_enabled())
    if x_shard_k.dim() > 2:
        y = y.view(-1, *x_shard_k.shape[1:-1], y.shape[-1])
    return y if bias is None else y + bias


class _LinearAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_shard_m: torch.Tensor, w: torch.Tensor, linear: Linear) -> torch.Tensor:
        world_size, features = linear.world_size, linear.w.shape[0]
        y = rank_rows(linear, linear.w.new_empty(world_size * linear.rows_of_rank, features // world_size))
        linear.to_heads(x_shard_m, y)
        ctx.linear = linear
        ctx.save_for_backward(x_shard_m if ctx.needs_input_grad[1] else None, linear.w)
        return y.x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_shard_n: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x_shard_m, w = ctx.saved_tensors
        dy = rank_rows(ctx.linear, dy_shard_n.contiguous())
        return *ctx.linear.multiplying(w).heads_backward(x_shard_m, dy, ctx.needs_input_grad[0]), None


class _ToRows(torch.autograd.Function):
    """The autograd function of y = all_to_all(x) @ w.T. finder: where the rows that are exchanged lie in x, and in dx. trains:
    gradients are enabled."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        linear: Linear | ShardedLinear,
        finder: Callable[[torch.Tensor], Rows],
        trains: bool,
    ) -> torch.Tensor:
        x = x.contiguous()
        y, kept = linear.to_rows(finder(x), linear.keeps and trains and w.requires_grad)
        ctx.linear, ctx.finder, ctx.shape = linear, finder, x.shape
        ctx.save_for_backward(*(kept or [x] if ctx.needs_input_grad[1] else [None]), linear.w)
        return y  # whole and not as a view, which autograd would refuse to have written into

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        *saved, w = ctx.saved_tensors
        linear = ctx.linear.multiplying(w)
        dx = dy.new_empty(ctx.shape) if ctx.needs_input_grad[0] else None
        into = None if dx is None else ctx.finder(dx)
        x = None
        if ctx.needs_input_grad[1]:
            x = saved if linear.keeps else ctx.finder(saved[0])
        return dx, linear.rows_backward(x, dy, into), None, None, None


_apply_linear_all_to_all, apply_to_rows = applied(_LinearAllToAll), applied(_ToRows)


def rank_rows(linear: Linear, x: torch.Tensor) -> RankRows:
    """The RankRows of x [M, C]: its rows lie rank after rank."""
    return RankRows(x, linear.world_size, linear.batch)
