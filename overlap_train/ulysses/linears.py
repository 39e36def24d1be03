"""The linears of Ulysses sequence parallelism, and their autograd functions: weights are replicated, heads are sharded.

    linear_all_to_all        forward  GEMM + A2A          dgrad  A2A(dy) + GEMM       wgrad  with the dy just received
    all_to_all_linear        forward  A2A(x) + GEMM       dgrad  GEMM + A2A           wgrad  A2A(x), sent again or kept

W ranks; M global rows (the product of all leading dimensions, the first of which is the sequence); K input, N output features.
Source: DeepSpeed-Ulysses (arXiv 2309.14509) for the all-to-alls around attention; linear.py for how passes overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ..config import OverlapConfig
from ..linear import as_rows, run_eagerly
from ..operators.all_to_all_gemm import start_all_to_all_gemm
from ..operators.gemm_all_to_all import start_gemm_all_to_all
from ..operators.plan_book import PassTags, Planned, plan_of
from ..operators.weight_gradient import weight_gradient
from ..planning.heads import AttentionHeads
from ..planning.spec import ALL_TO_ALL_LINEAR, LINEAR_ALL_TO_ALL
from ..runtime.profiling import profiled


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
    planned, sent = plan_sent(x_shard_m, w, bias, heads, group, config, name)
    y = _LinearAllToAll.apply(as_rows(x_shard_m), w, sent.w, sent.rows, planned, planned.tags(name))
    if x_shard_m.dim() > 2:
        y = y.view(x_shard_m.shape[0] * planned.domain.world_size, *x_shard_m.shape[1:-1], -1)
    return y if sent.bias is None else y + sent.bias


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
    planned = plan_of(ALL_TO_ALL_LINEAR, x_shard_k, w, bias, group, config, name)
    y = _AllToAllLinear.apply(as_rows(x_shard_k), w, planned, planned.tags(name), torch.is_grad_enabled())
    if x_shard_k.dim() > 2:
        y = y.view(x_shard_k.shape[0] // planned.domain.world_size, *x_shard_k.shape[1:-1], -1)
    return y if bias is None else y + bias


@dataclass(frozen=True)
class Sent:
    """What is multiplied and sent: rows of w, each once and in order (rows is None) or not; bias: of this rank's columns."""

    w: torch.Tensor
    rows: torch.Tensor | None
    bias: torch.Tensor | None


def plan_sent(
    x_shard_m: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, heads: AttentionHeads | None,
    group: dist.ProcessGroup, config: OverlapConfig | None, name: str,
) -> tuple[Planned, Sent]:  # fmt: skip
    """The plan of linear_all_to_all, and what it sends."""
    rows = None if heads is None else _sent_rows(heads, w, group, name)
    w_sent = w if rows is None else w.detach().index_select(0, rows).requires_grad_(w.requires_grad)
    bias_sent = bias if bias is None or rows is None else bias[rows]
    planned = plan_of(LINEAR_ALL_TO_ALL, x_shard_m, w_sent, bias_sent, group, config, name)
    domain = planned.domain
    own_bias = None if bias_sent is None else bias_sent.chunk(domain.world_size)[domain.rank]
    return planned, Sent(w_sent.detach(), rows, own_bias)


def _sent_rows(heads: AttentionHeads, w: torch.Tensor, group: dist.ProcessGroup, name: str) -> torch.Tensor | None:
    """The rows of w whose products are sent, where that is not each once and in order."""
    world_size = dist.get_world_size(group)
    error = heads.error(world_size, name)
    if error is None and w.dim() == 2 and w.shape[0] != heads.features:
        error = f"{name}: w has {w.shape[0]} rows (shape {tuple(w.shape)}), {heads} needs {heads.features}; they must be equal"
    if error is not None:
        raise ValueError(error)
    return heads.sent_rows(world_size, w.device)


class _LinearAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_shard_m: torch.Tensor, w: torch.Tensor, w_sent: torch.Tensor, rows: torch.Tensor | None,
        planned: Planned, tags: PassTags,
    ) -> torch.Tensor:  # fmt: skip
        domain, plan = planned.domain, planned.plan
        with domain.operator(tags.fprop, plan.fprop.slots), profiled(tags.ranges[0]):
            y_shard_n = start_gemm_all_to_all(domain, plan.fprop, tags.fprop, x_shard_m, w_sent.t()).received_copy()
        # weight: itself, for its main_grad; hooks on saved tensors (checkpointing) give back another object.
        ctx.planned, ctx.tags, ctx.weight = planned, tags, w
        ctx.save_for_backward(x_shard_m if ctx.needs_input_grad[1] else None, w_sent, rows)
        return y_shard_n

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy_shard_n: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None, None]:
        return *exchange_backward(ctx, dy_shard_n), None, None, None, None


def exchange_backward(ctx: Any, dy_shard_n: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx_shard_m, dw) from dy_shard_n [M, N/W], which is sent as it lies. ctx: as _LinearAllToAll.forward has left it."""
    x_shard_m, w_sent, rows = ctx.saved_tensors[:3]
    domain, plan, tags = ctx.planned.domain, ctx.planned.plan, ctx.tags
    wants_dx, wants_dw = ctx.needs_input_grad[:2]
    dx_shard_m = dw = None
    with domain.operator(tags.dgrad, plan.dgrad.slots), profiled(tags.ranges[1]):
        receiver = start_all_to_all_gemm(domain, plan.dgrad, tags.dgrad, dy_shard_n)
        if wants_dx:
            dx_shard_m = receiver.matmul(w_sent)
        dy_blocks = receiver.received_view() if wants_dw or not wants_dx else None
        if dy_blocks is not None and wants_dw:
            dy = dy_blocks if rows is None else summed_copies(dy_blocks, rows, ctx.weight.shape[0])
            with profiled(tags.ranges[2]):
                dw = weight_gradient(dy, x_shard_m, ctx.weight, plan.config.main_grad)
    return dx_shard_m, dw


def summed_copies(dy_blocks: torch.Tensor, rows: torch.Tensor, n: int) -> torch.Tensor:
    """dy [M/W, N] from [W, M/W, n/W], column i of which belongs to row rows[i] of the weight.

    Copies are added in fp32 and in the order of ranks.
    """
    total = dy_blocks.new_zeros(dy_blocks.shape[1], n, dtype=torch.float32)
    for block, columns in zip(dy_blocks, rows.chunk(len(dy_blocks)), strict=True):
        total[:, columns] += block  # within a block each column comes once
    return total.to(dy_blocks.dtype)


class _AllToAllLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_shard_k: torch.Tensor, w: torch.Tensor, planned: Planned, tags: PassTags, trains: bool
    ) -> torch.Tensor:
        domain, plan = planned.domain, planned.plan
        keep = plan.wgrad is None and trains and w.requires_grad
        with domain.operator(tags.fprop, plan.fprop.slots), profiled(tags.ranges[0]):
            receiver = start_all_to_all_gemm(domain, plan.fprop, tags.fprop, x_shard_k)
            y_shard_m = receiver.matmul(w.t())
            saved = receiver.received_copy() if keep else x_shard_k
        ctx.planned, ctx.tags, ctx.weight = planned, tags, w  # as above
        ctx.save_for_backward(saved if ctx.needs_input_grad[1] else None, w)
        return y_shard_m

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy_shard_m: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        saved, w = ctx.saved_tensors
        domain, plan, tags = ctx.planned.domain, ctx.planned.plan, ctx.tags
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        dx_shard_k = dw = exchange = receiver = None
        wgrad = plan.wgrad if wants_dw else None
        slots = (0 if wgrad is None else wgrad.slots) + wants_dx * plan.dgrad.slots
        with domain.operator(tags.dgrad, slots), profiled(tags.ranges[1]):
            if wgrad is not None:
                receiver = start_all_to_all_gemm(domain, wgrad, tags.wgrad, saved)
            if wants_dx:
                exchange = start_gemm_all_to_all(domain, plan.dgrad, tags.dgrad, dy_shard_m, w)
            if wants_dw:
                kept = saved.unflatten(0, (domain.world_size, -1)) if receiver is None else None
                x_blocks = kept if receiver is None else receiver.received_view()
                with profiled(tags.ranges[2]):
                    dw = weight_gradient(dy_shard_m, x_blocks, ctx.weight, plan.config.main_grad)
            if exchange is not None:
                dx_shard_k = exchange.received_copy()
        return dx_shard_k, dw, None, None, None
