"""Between what an all-to-all brings and what attention wants, in one pass over the data each way.

    unpack   received [s, b, n], rows rank after rank, columns per KV head q..q k v  ->  q, k, v in the order of the sequence
    pack     dq, dk, dv  ->  [s, b, n], the inverse and transposed map, which is sent

n = (query + 2 kv) dim, all of this rank's heads. A bias is added and q and k are rotated in the same read and write. The copy out
of symmetric memory thus costs nothing beside what a model does anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..planning.heads import AttentionHeads

BLOCK_H = 8  # heads that a program moves: 2 KB of bf16 with 128 features each
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
    if received.device.type == "cuda":
        return unpack_by_kernel(received, bias, layout)
    y = received if layout.rows is None else received.index_select(0, layout.rows)
    y = y if bias is None else y + bias
    q, k, v = _groups(y, layout.heads).split([layout.heads.per_group, 1, 1], dim=-2)
    q, k, v = q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)
    if layout.rotary is not None:
        q, k = (_rotated(x, layout.rotary, 1) for x in (q, k))
    return q.contiguous(), k.contiguous(), v.clone(memory_format=torch.contiguous_format)


def pack(dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
    """[s, b, n] from dq [s, b, query, dim] and dk, dv [s, b, kv, dim]."""
    if dq.device.type == "cuda":
        return pack_by_kernel(dq, dk, dv, layout)
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


def unpack_by_kernel(received: torch.Tensor, bias: torch.Tensor | None, layout: AttentionLayout) -> Heads:
    """unpack in one read and one write."""
    from ..kernels.attention_layout import unpack_kernel

    heads, (s, b) = layout.heads, received.shape[:2]
    q, k, v = (received.new_empty(s, b, count, heads.dim) for count in (heads.query, heads.kv, heads.kv))
    tables, constants, grid = _launch(received, layout)
    places = [stride for tensor in (q, k, v) for stride in tensor.stride()[:3]]
    bias_at = received if bias is None else bias
    unpack_kernel[grid](received, bias_at, *tables, q, k, v, b, *places, HAS_BIAS=bias is not None, **constants)
    return q, k, v


def pack_by_kernel(dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
    """pack in one read and one write, whatever the strides of dq, dk and dv."""
    from ..kernels.attention_layout import pack_kernel

    dq, dk, dv = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv))
    packed = dq.new_empty(*dq.shape[:2], layout.heads.features)
    tables, constants, grid = _launch(packed, layout)
    places = [stride for tensor in (dq, dk, dv) for stride in tensor.stride()[:3]]
    pack_kernel[grid](packed, *tables, dq, dk, dv, dq.shape[1], *places, **constants)
    return packed


def _launch(
    packed: torch.Tensor, layout: AttentionLayout
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any], tuple[int, int]]:
    """What both kernels are told about rows and angles (packed where there are none), their constants, and the grid."""
    heads, rotary, rows = layout.heads, layout.rotary, layout.rows
    rotated = 0 if rotary is None else rotary.cos.shape[-1]
    angles = (packed, packed) if rotary is None else (rotary.cos.contiguous(), rotary.sin.contiguous())
    count = heads.query + 2 * heads.kv
    constants = dict(
        HEADS=count, PER_GROUP=heads.per_group, DIM=heads.dim, ROTATED=rotated, HAS_ROWS=rows is not None,
        INTERLEAVED=rotary is not None and rotary.interleaved, BLOCK_H=BLOCK_H, PAIRS=_power_of_two(rotated // 2),
        REST=_power_of_two(heads.dim - rotated),
    )  # fmt: skip
    grid = (packed.shape[0] * packed.shape[1], -(-count // BLOCK_H))
    return (packed if rows is None else rows, *angles), constants, grid


def _power_of_two(size: int) -> int:
    """The next one, at least 1."""
    return 1 << max(0, size - 1).bit_length()


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
