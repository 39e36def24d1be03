"""The projections around a Ulysses attention: q, k and v of all rows and some heads, and back to a sequence shard."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ..config import OverlapConfig
from ..linear import as_rows, run_eagerly
from ..operators.attention_layout import AttentionLayout, Rotary, pack, unpack
from ..operators.gemm_all_to_all import start_gemm_all_to_all
from ..operators.plan_book import PassTags, Planned
from ..planning.heads import AttentionHeads
from ..planning.sequence import SequenceLayout
from ..runtime.profiling import profiled
from .linears import Sent, all_to_all_linear, exchange_backward, plan_sent

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
    error = _error(x_shard_m, layout, rotary, world_size, name)
    if error is not None:
        raise ValueError(error)
    planned, sent = plan_sent(x_shard_m, w, bias, heads, group, config, name)
    rows = layout.received_rows(x_shard_m.shape[0] * world_size, world_size)
    rows = None if rows is None else rows.to(x_shard_m.device)
    in_place = AttentionLayout(heads.of_rank(world_size), rows, rotary)
    return _QkvAllToAll.apply(x_shard_m, w, sent.bias, sent, planned, planned.tags(name), in_place)


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
    world_size = dist.get_world_size(group)
    error = _error(x, layout, None, world_size, name, of_rank=1)
    if error is not None:
        raise ValueError(error)
    rows = layout.received_rows(x.shape[0], world_size)
    if rows is not None:
        x = x.index_select(0, rows.argsort().to(x.device))  # what the ranks get, rank after rank
    return all_to_all_linear(x, w, bias, group=group, config=config, name=name)


def _error(
    x: torch.Tensor, layout: SequenceLayout, rotary: Rotary | None, world_size: int, name: str, of_rank: int = 0
) -> str | None:
    """What is wrong with x [s, ...] (of_rank) or [s/W, ...] and what goes with it, or None."""
    if x.dim() != 3:
        return f"{name}: the input has shape {tuple(x.shape)}; it must be [sequence, batch, features]"
    rows = x.shape[0] if of_rank else x.shape[0] * world_size
    if rotary is not None and (rotary.cos.shape != rotary.sin.shape or rotary.cos.shape[:-1].numel() != rows):
        shapes = f"cos {tuple(rotary.cos.shape)} and sin {tuple(rotary.sin.shape)}"
        return f"{name}: rotary has {shapes}; both must have a row for each of the {rows} rows of all ranks"
    return layout.error(rows, world_size, name)


class _QkvAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_shard_m: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, sent: Sent, planned: Planned,
        tags: PassTags, layout: AttentionLayout,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        domain, plan = planned.domain, planned.plan
        x_rows = as_rows(x_shard_m)
        with domain.operator(tags.fprop, plan.fprop.slots), profiled(tags.ranges[0]):
            received = start_gemm_all_to_all(domain, plan.fprop, tags.fprop, x_rows, sent.w.t()).received_view()
            q, k, v = unpack(received.reshape(-1, x_shard_m.shape[1], layout.heads.features), bias, layout)
        ctx.planned, ctx.tags, ctx.weight, ctx.layout = planned, tags, w, layout  # weight: see linear.py
        ctx.save_for_backward(x_rows if ctx.needs_input_grad[1] else None, sent.w, sent.rows)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None, None, None]:
        dy = pack(dq, dk, dv, ctx.layout).flatten(0, 1)
        dbias = dy.float().sum(0).to(dy.dtype) if ctx.needs_input_grad[2] else None
        dx, dw = exchange_backward(ctx, dy)
        return None if dx is None else dx.view(-1, dq.shape[1], dx.shape[-1]), dw, dbias, None, None, None, None
