"""Converts between what an all-to-all brings and what attention wants, in one pass over the data each way.

    unpack   packed [r, b, n], any r rows of the sequence  ->  those rows of q, k, v [s, b, heads, dim]
    pack     the same rows of dq, dk, dv  ->  [r, b, n], the transposed map, which is sent

n = (query + 2 kv) dim: per KV head its query heads, k, v, all of this rank's. `rows` [r] says which rows of the sequence they
are, and -1 of padding: unpack leaves it out, pack writes 0. A bias is added, and q and k are rotated in fp32, in the same read
and write. The copy out of symmetric memory thus costs nothing beside what a model does anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from .layout import AttentionHeads

BLOCK_H = 8  # heads that a program moves: 2 KB of bf16 with 128 features each
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class QkNorm:
    """RMSNorm of each head of q and of k, before the rotation: y = x / sqrt(mean(x²) + eps) * weight.

        q_weight, k_weight  [dim]   the same on every rank, of any floating dtype

    zero_centered: weights are distances from one, y = x / sqrt(mean(x²) + eps) * (1 + weight), as Megatron's
    layernorm_zero_centered_gamma.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float
    zero_centered: bool = False

    @property
    def meaning(self) -> str:
        """What ranks must agree on, in words. Weights are not compared."""
        return f"normalised with eps {self.eps:g}" + " around one" * self.zero_centered

    def error(self, device: torch.device, dim: int, name: str) -> str | None:
        for one in (self.q_weight, self.k_weight):
            if one.shape != (dim,) or one.device != device or not self.eps > 0:
                found = f"qk_norm has weights {list(one.shape)} on {one.device} and eps {self.eps}"
                return f"{name}: {found}; they must be [{dim}] on {device}, and eps above 0"
        return None

    def of(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [s, b, heads, dim] normalised, computed in fp32."""
        scale, inputs = weight, x
        if self.zero_centered or weight.dtype != x.dtype:
            scale, inputs = weight.float() + float(self.zero_centered), x.float()
        return F.rms_norm(inputs, x.shape[-1:], scale, self.eps).to(x.dtype)


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of q and k: cos, sin [s, r], of the first r <= dim features of each head.

    interleaved: features 2i and 2i + 1 are a pair; else i and i + r/2.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False

    @property
    def meaning(self) -> str:
        """What ranks must agree on, in words. Angles are not compared."""
        return f"{self.cos.shape[-1]} features rotated" + " in neighbouring pairs" * self.interleaved

    def error(self, rows: int, dim: int, device: torch.device, name: str) -> str | None:
        cos, sin, rotated = self.cos, self.sin, self.cos.shape[-1]
        if cos.shape != sin.shape or cos.shape[:-1].numel() != rows:
            shapes = f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)}"
            return f"{name}: rotary has {shapes}; both must have a row for each of the {rows} rows of all ranks"
        if cos.device != device or sin.device != device:
            where = f"cos on {cos.device} and sin on {sin.device}, the input is on {device}"
            return f"{name}: rotary has {where}; move them there"
        if rotated % 2 or not 0 < rotated <= dim:
            return f"{name}: rotary turns {rotated} features of each head, which has {dim}; it must be an even number of them"
        return None


def unpack(
    packed: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor, into: Heads, rotary: Rotary | None
) -> None:
    """Write rows of q, k and v (into) from packed [r, b, n] and bias [n]."""
    if packed.device.type == "cuda":
        return unpack_by_kernel(packed, bias, rows, into, rotary)
    if rows.min() < 0:  # on CPUs nobody waits for the answer
        packed, rows = packed[rows >= 0], rows[rows >= 0]
    heads = heads_of(into)
    y = packed if bias is None else packed + bias
    groups = y.view(*y.shape[:2], heads.kv, heads.per_group + 2, heads.dim)
    q, k, v = (part.flatten(2, 3) for part in groups.split([heads.per_group, 1, 1], dim=-2))
    if rotary is not None:
        q, k = (rotated(x, rotary, rows) for x in (q, k))
    for whole, part in zip(into, (q, k, v), strict=True):
        whole[rows] = part
    return None


def pack(grads: Heads, rows: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """[r, b, n] from rows of dq, dk and dv."""
    if grads[0].device.type == "cuda":
        return pack_by_kernel(grads, rows, rotary)
    heads = heads_of(grads)
    if rows.min() < 0:
        packed = grads[0].new_zeros(len(rows), grads[0].shape[1], heads.features)
        packed[rows >= 0] = pack(grads, rows[rows >= 0], rotary)
        return packed
    dq, dk, dv = (grad[rows] for grad in grads)
    if rotary is not None:
        dq, dk = (rotated(x, rotary, rows, -1) for x in (dq, dk))
    return torch.cat([part.unflatten(2, (heads.kv, -1)) for part in (dq, dk, dv)], dim=-2).flatten(2)


def heads_of(heads: Heads) -> AttentionHeads:
    """The AttentionHeads (query heads, KV heads, features) of q [s, b, query, dim] and k, v [s, b, kv, dim]."""
    return AttentionHeads(heads[0].shape[2], heads[1].shape[2], heads[0].shape[3])


def unpack_by_kernel(
    packed: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor, into: Heads, rotary: Rotary | None
) -> None:
    """unpack in one read and one write."""
    from ..kernels.attention_layout import unpack_kernel

    tables, constants, blocks = _launch(packed, rows, into, rotary)
    bias = bias if bias is None else bias.contiguous()
    unpack_kernel[packed.shape[0] * packed.shape[1], blocks](packed, bias, *tables, **constants)


def pack_by_kernel(grads: Heads, rows: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """pack in one read and one write, whatever the strides of dq, dk and dv."""
    from ..kernels.attention_layout import pack_kernel

    grads = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in grads)  # type: ignore[assignment]
    packed = grads[0].new_empty(len(rows), grads[0].shape[1], heads_of(grads).features)
    tables, constants, blocks = _launch(packed, rows, grads, rotary)
    pack_kernel[packed.shape[0] * packed.shape[1], blocks](packed, *tables, **constants)
    return packed


def _launch(
    packed: torch.Tensor, rows: torch.Tensor, tensors: Heads, rotary: Rotary | None
) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """What both kernels are told of rows, angles (packed, if there are none), q, k and v; their constants; blocks of heads."""
    heads, turned = heads_of(tensors), 0 if rotary is None else rotary.cos.shape[-1]
    angles = (packed, packed) if rotary is None else (rotary.cos.contiguous(), rotary.sin.contiguous())
    count = heads.query + 2 * heads.kv
    constants = dict(
        HEADS=count, PER_GROUP=heads.per_group, DIM=heads.dim, ROTATED=turned, BLOCK_H=BLOCK_H,
        INTERLEAVED=rotary is not None and rotary.interleaved,
        PAIRS=_power_of_two(turned // 2), REST=_power_of_two(heads.dim - turned),
    )  # fmt: skip
    places = [stride for tensor in tensors for stride in tensor.stride()[:3]]
    return (rows, *angles, *tensors, packed.shape[1], *places), constants, -(-count // BLOCK_H)


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def rotated(x: torch.Tensor, rotary: Rotary, rows: torch.Tensor | slice, direction: int = 1) -> torch.Tensor:
    """x [r, b, heads, dim], of these rows of the sequence, rotated in fp32. direction: 1, or -1 for the transpose."""
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
