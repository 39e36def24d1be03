"""Between what an all-to-all brings and what attention wants, in one pass over the data each way.

    unpack   packed [r, b, n], any r rows of the sequence  ->  those rows of q, k, v [s, b, heads, dim]
    pack     the same rows of dq, dk, dv  ->  [r, b, n], the transposed map, which is sent

n = (query + 2 kv) dim: per KV head its query heads, k, v, all of this rank's. `rows` [r] says which rows of the sequence they
are. A bias is added and q and k are rotated in the same read and write. The copy out of symmetric memory thus costs nothing
beside what a model does anyway.
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


def unpack(
    packed: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor, into: Heads, rotary: Rotary | None
) -> None:
    """Write rows of q, k and v (into) from packed [r, b, n] and bias [n]."""
    if packed.device.type == "cuda":
        return unpack_by_kernel(packed, bias, rows, into, rotary)
    heads = heads_of(into)
    y = packed if bias is None else packed + bias
    y = y.view(*y.shape[:2], heads.kv, heads.per_group + 2, heads.dim)
    q, k, v = (part.flatten(2, 3) for part in y.split([heads.per_group, 1, 1], dim=-2))
    if rotary is not None:
        q, k = (_rotated(x, rotary, rows, 1) for x in (q, k))
    for whole, part in zip(into, (q, k, v), strict=True):
        whole[rows] = part
    return None


def pack(grads: Heads, rows: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """[r, b, n] from rows of dq, dk and dv."""
    if grads[0].device.type == "cuda":
        return pack_by_kernel(grads, rows, rotary)
    heads = heads_of(grads)
    dq, dk, dv = (grad[rows] for grad in grads)
    if rotary is not None:
        dq, dk = (_rotated(x, rotary, rows, -1) for x in (dq, dk))
    grouped = (*dq.shape[:2], heads.kv, -1, heads.dim)
    return torch.cat([part.reshape(grouped) for part in (dq, dk, dv)], dim=-2).flatten(2)


def heads_of(heads: Heads) -> AttentionHeads:
    """Of q [s, b, query, dim] and k, v [s, b, kv, dim]."""
    return AttentionHeads(heads[0].shape[2], heads[1].shape[2], heads[0].shape[3])


def unpack_by_kernel(
    packed: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor, into: Heads, rotary: Rotary | None
) -> None:
    """unpack in one read and one write."""
    from ..kernels.attention_layout import unpack_kernel

    tables, constants, grid = _launch(packed, rows, into, rotary)
    bias_at = packed if bias is None else bias.contiguous()
    unpack_kernel[grid](packed, bias_at, *tables, HAS_BIAS=bias is not None, **constants)


def pack_by_kernel(grads: Heads, rows: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """pack in one read and one write, whatever the strides of dq, dk and dv."""
    from ..kernels.attention_layout import pack_kernel

    grads = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in grads)  # type: ignore[assignment]
    packed = grads[0].new_empty(len(rows), grads[0].shape[1], heads_of(grads).features)
    tables, constants, grid = _launch(packed, rows, grads, rotary)
    pack_kernel[grid](packed, *tables, **constants)
    return packed


def _launch(
    packed: torch.Tensor, rows: torch.Tensor, tensors: Heads, rotary: Rotary | None
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[int, int]]:
    """What both kernels are told of rows, angles (packed, if there are none), q, k and v; their constants; the grid."""
    heads, rotated = heads_of(tensors), 0 if rotary is None else rotary.cos.shape[-1]
    angles = (packed, packed) if rotary is None else (rotary.cos.contiguous(), rotary.sin.contiguous())
    count = heads.query + 2 * heads.kv
    constants = dict(
        HEADS=count, PER_GROUP=heads.per_group, DIM=heads.dim, ROTATED=rotated, BLOCK_H=BLOCK_H,
        INTERLEAVED=rotary is not None and rotary.interleaved, PAIRS=_power_of_two(rotated // 2),
        REST=_power_of_two(heads.dim - rotated),
    )  # fmt: skip
    places = [stride for tensor in tensors for stride in tensor.stride()[:3]]
    grid = (packed.shape[0] * packed.shape[1], -(-count // BLOCK_H))
    return (rows, *angles, *tensors, packed.shape[1], *places), constants, grid


def _power_of_two(size: int) -> int:
    """The next one, at least 1."""
    return 1 << max(0, size - 1).bit_length()


def _rotated(x: torch.Tensor, rotary: Rotary, rows: torch.Tensor, direction: int) -> torch.Tensor:
    """x [r, b, heads, dim] rotated in fp32. direction: 1, or -1 for the transpose."""
    r = rotary.cos.shape[-1]
    turned, rest = x[..., :r].float(), x[..., r:]
    cos, sin = (t.view(-1, r)[rows].float().view(len(x), 1, 1, r) for t in (rotary.cos, rotary.sin))
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
