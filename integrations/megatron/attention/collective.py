"""The exchange of finished q, k, v and context by torch.distributed's all-to-all: right everywhere, overlapped with nothing.

It serves where no operator multiplies and exchanges at once: with tensor parallelism, whose column linear gathers first, in
evaluation mode, and for linears that have no overlapped form. Its gradient is the exchange back, which is itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from overlap_train.integrations.megatron.linears.exchange import Exchange

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def collective_to_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, exchange: Exchange) -> Heads:
    """q [s, b, query/W, dim], k and v [s, b, max(1, kv/W), dim] in the order of the sequence from [s/W, b, heads, dim].

    k and v of a head that several ranks need go to each of them; autograd adds their gradients.
    """
    ranks = exchange.ranks
    if ranks == 1:
        return q, k, v
    copies = max(1, ranks // k.size(2))
    k, v = (x.repeat_interleave(copies, dim=2) if copies > 1 else x for x in (k, v))
    sizes = [x.size(2) // ranks for x in (q, k, v)]
    sent = torch.cat([x.unflatten(2, (ranks, -1)) for x in (q, k, v)], dim=3).permute(2, 0, 1, 3, 4)
    received = _Exchange.apply(sent, exchange.group).flatten(0, 1)
    in_order = received.index_select(0, exchange.places)
    return tuple(x.contiguous() for x in in_order.split(sizes, dim=2))  # type: ignore[return-value]


def collective_to_rows(context: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """[s/W, b, K], a sequence shard with all heads, from [s, b, K/W] in the order of the sequence."""
    if exchange.ranks == 1:
        return context
    sent = context.index_select(0, exchange.order).unflatten(0, (exchange.ranks, -1))
    received = _Exchange.apply(sent, exchange.group)
    return received.permute(1, 2, 0, 3).flatten(2)


class _Exchange(torch.autograd.Function):
    """Block i of [W, ...] goes to rank i and is replaced by rank i's block for this one."""

    @staticmethod
    def forward(ctx: Any, blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchanged(blocks, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(gradient, ctx.group), None


def _exchanged(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    received = torch.empty(blocks.shape, dtype=blocks.dtype, device=blocks.device)
    dist.all_to_all_single(received, blocks.contiguous(), group=group)
    return received
