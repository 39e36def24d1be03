"""Between what an all-to-all brings and what attention wants, in one pass over the data each way.

    unpack   received [s, b, n], rows rank after rank, columns per KV head q..q k v  ->  q, k, v in the order of the sequence
    pack     dq, dk, dv  ->  [s, b, n], the inverse and transposed map, which is sent

n = (query + 2 kv) dim, all of this rank's heads. A bias is added and q and k are rotated in the same read and write. The copy out
of symmetric memory thus costs nothing beside what a model does anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..planning.heads import AttentionHeads

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of q and k: cos, sin [s, r], of the first r <= dim features of each head.

    interleaved: features 2i and 2i + 1 are a pair; else i and i + r/2.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False


@dataclass(frozen=True)
class AttentionLayout:
    """heads: of this rank. rows: where each row of the sequence is among the received ones; None: there."""

    heads: AttentionHeads
    rows: torch.Tensor | None = None
    rotary: Rotary | None = None


def unpack(received: torch.Tensor, bias: torch.Tensor | None, layout: AttentionLayout) -> Heads:
    """q [s, b, query, dim], k and v [s, b, kv, dim] from received [s, b, n] and bias [n]."""
    y = received if layout.rows is None else received.index_select(0, layout.rows)
    y = y if bias is None else y + bias
    q, k, v = _groups(y, layout.heads).split([layout.heads.per_group, 1, 1], dim=-2)
    q, k, v = q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)
    if layout.rotary is not None:
        q, k = (_rotated(x, layout.rotary, 1) for x in (q, k))
    return q.contiguous(), k.contiguous(), v.clone(memory_format=torch.contiguous_format)


def pack(dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
    """[s, b, n] from dq [s, b, query, dim] and dk, dv [s, b, kv, dim]."""
    heads = layout.heads
    if layout.rotary is not None:
        dq, dk = (_rotated(x, layout.rotary, -1) for x in (dq, dk))
    s, b = dq.shape[:2]
    grouped = (s, b, heads.kv, -1, heads.dim)
    y = torch.cat([part.reshape(grouped) for part in (dq, dk, dv)], dim=-2).view(s, b, heads.features)
    if layout.rows is None:
        return y
    sent = torch.empty_like(y)
    sent[layout.rows] = y
    return sent


def _groups(y: torch.Tensor, heads: AttentionHeads) -> torch.Tensor:
    """[s, b, n] as [s, b, kv, query heads of the group + 2, dim]."""
    return y.view(*y.shape[:2], heads.kv, heads.per_group + 2, heads.dim)


def _rotated(x: torch.Tensor, rotary: Rotary, direction: int) -> torch.Tensor:
    """x [s, b, heads, dim] rotated in fp32. direction: 1, or -1 for the inverse, which is the transpose."""
    r = rotary.cos.shape[-1]
    turned, rest = x[..., :r].float(), x[..., r:]
    cos, sin = (t.float().view(len(x), 1, 1, r) for t in (rotary.cos, rotary.sin))
    if direction > 0:
        turned = turned * cos + _half_turned(turned, rotary.interleaved) * sin
    else:
        turned = turned * cos - _half_turned(turned * sin, rotary.interleaved)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def _half_turned(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """(-second, first) of each pair."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
