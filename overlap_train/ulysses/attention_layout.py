"""Converts between what an all-to-all brings and what attention wants, in one pass over the data each way.

    unpack   packed [r, b, n], any r rows of the sequence  ->  those rows of q, k, v [s, b, heads, dim]
    pack     the same rows of dq, dk, dv  ->  [r, b, n], the transposed map, which is sent

n = (query + 2 kv) dim: per KV head its query heads, k, v, all of this rank's. `rows` [r] says which rows of the sequence they
are, and -1 of padding: unpack leaves it out, pack writes 0. A bias is added, and q and k are normalised and rotated, in the same
read and write. The copy out of symmetric memory thus costs nothing beside what a model does anyway.

    y = x / rms(x) * weight       rms(x) = sqrt(mean(x²) + eps) over the head's dim features
    dx = (g - n mean(g n)) / rms(x)       with n = x / rms(x) and g = dy * weight
    dweight = sum of dy n over rows and heads, in fp32

All of it is computed in fp32. x, y, dy and dx are rounded to the dtype of the activations, where torch.nn.RMSNorm rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from .layout import AttentionHeads

BLOCK_H = 8  # heads that a program moves: 2 KB of bf16 with 128 features each
NORM_ROWS = 16  # that a program takes where it sums gradients of weights: the sums are 1 KB beside 96 KB of bf16
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

    def having(self, q_weight: torch.Tensor, k_weight: torch.Tensor) -> QkNorm:
        """This norm with its weights as autograd has kept them."""
        return replace(self, q_weight=q_weight, k_weight=k_weight)

    def error(self, dim: int, device: torch.device, name: str) -> str | None:
        q, k = self.q_weight, self.k_weight
        if not isinstance(self.eps, int | float) or not self.eps > 0:
            return f"{name}: qk_norm.eps={self.eps!r} must be a number above 0, such as 1e-6"
        if q.shape != (dim,) or k.shape != (dim,):
            return f"{name}: qk_norm has weights {tuple(q.shape)} and {tuple(k.shape)}; both must be [{dim}], a head's features"
        if q.device != device or k.device != device:
            where = f"weights on {q.device} and {k.device}, the input is on {device}"
            return f"{name}: qk_norm has {where}; move them there"
        return None


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


class HeadNorm:
    """What one call normalises with. Rows come and go in parts; `rows` [r] says which rows of the sequence a part has.

    before            [s, b, kv, query / kv + 1, dim]: of each group its query heads and k, before the norm; None: nothing is kept
    weight_gradients  fp32 [2, dim], of q_weight and k_weight: what all parts add up to
    """

    def __init__(self, norm: QkNorm, before: torch.Tensor | None) -> None:
        self.norm, self.before = norm, before
        self.weight_gradients = torch.zeros(2, len(norm.q_weight), dtype=torch.float32, device=norm.q_weight.device)

    def apply(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """x [r, b, kv, query / kv + 1, dim], normalised. It is kept for backward."""
        if self.before is not None:
            self.before[rows] = x
        return (x.float() * self._inverse_rms(x) * self._scales(x.shape[3])).to(x.dtype)

    def gradient(self, dy: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """dx of the rows that were kept, from dy of the same shape; adds to the weights' gradients."""
        assert self.before is not None
        x, g = self.before[rows], dy.float()
        inverse = self._inverse_rms(x)
        normalised = x.float() * inverse
        of_head = (g * normalised).sum((0, 1, 2))
        self.weight_gradients += torch.stack((of_head[:-1].sum(0), of_head[-1]))
        g = g * self._scales(x.shape[3])
        return ((g - normalised * (g * normalised).mean(-1, keepdim=True)) * inverse).to(dy.dtype)

    def of_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of q_weight and k_weight, in their dtypes."""
        q, k = self.weight_gradients
        return q.to(self.norm.q_weight.dtype), k.to(self.norm.k_weight.dtype)

    def _inverse_rms(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.norm.eps)

    def _scales(self, heads: int) -> torch.Tensor:
        """fp32 [heads, dim]: query heads, then k."""
        q, k = (weight.float() + float(self.norm.zero_centered) for weight in (self.norm.q_weight, self.norm.k_weight))
        return torch.cat((q.expand(heads - 1, -1), k[None]))


def unpack(
    packed: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor, into: Heads, rotary: Rotary | None,
    norm: HeadNorm | None = None,
) -> None:  # fmt: skip
    """Write rows of q, k and v (into) from packed [r, b, n] and bias [n]."""
    if packed.device.type == "cuda":
        return unpack_by_kernel(packed, bias, rows, into, rotary, norm)
    if rows.min() < 0:  # on CPUs nobody waits for the answer
        packed, rows = packed[rows >= 0], rows[rows >= 0]
    heads = heads_of(into)
    y = packed if bias is None else packed + bias
    qk, v = y.view(*y.shape[:2], heads.kv, heads.per_group + 2, heads.dim).split([heads.per_group + 1, 1], dim=-2)
    qk = qk if norm is None else norm.apply(qk, rows)
    q, k, v = (part.flatten(2, 3) for part in (*qk.split([heads.per_group, 1], dim=-2), v))
    if rotary is not None:
        q, k = (_rotated(x, rotary, rows, 1) for x in (q, k))
    for whole, part in zip(into, (q, k, v), strict=True):
        whole[rows] = part
    return None


def pack(grads: Heads, rows: torch.Tensor, rotary: Rotary | None, norm: HeadNorm | None = None) -> torch.Tensor:
    """[r, b, n] from rows of dq, dk and dv. norm: that of unpack, which has kept these rows."""
    if grads[0].device.type == "cuda":
        return pack_by_kernel(grads, rows, rotary, norm)
    heads = heads_of(grads)
    if rows.min() < 0:
        packed = grads[0].new_zeros(len(rows), grads[0].shape[1], heads.features)
        packed[rows >= 0] = pack(grads, rows[rows >= 0], rotary, norm)
        return packed
    dq, dk, dv = (grad[rows] for grad in grads)
    if rotary is not None:
        dq, dk = (_rotated(x, rotary, rows, -1) for x in (dq, dk))
    dq, dk, dv = (part.unflatten(2, (heads.kv, -1)) for part in (dq, dk, dv))
    dqk = torch.cat([dq, dk], dim=-2)
    dqk = dqk if norm is None else norm.gradient(dqk, rows)
    return torch.cat([dqk, dv], dim=-2).flatten(2)


def heads_of(heads: Heads) -> AttentionHeads:
    """The AttentionHeads (query heads, KV heads, features) of q [s, b, query, dim] and k, v [s, b, kv, dim]."""
    return AttentionHeads(heads[0].shape[2], heads[1].shape[2], heads[0].shape[3])


def unpack_by_kernel(
    packed: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor, into: Heads, rotary: Rotary | None,
    norm: HeadNorm | None = None,
) -> None:  # fmt: skip
    """unpack in one read and one write."""
    from ..kernels.attention_layout import unpack_kernel
    from ..kernels.attention_norm import unpack_normed_kernel

    tables, constants, blocks = _launch(packed, rows, into, rotary, norm)
    grid, constants["HAS_BIAS"] = (packed.shape[0] * packed.shape[1], blocks), bias is not None
    bias_at = packed if bias is None else bias.contiguous()
    if norm is None:
        unpack_kernel[grid](packed, bias_at, *tables, **constants)
        return
    kept, weights = packed if norm.before is None else norm.before, _of_norm(norm.norm)
    unpack_normed_kernel[grid](packed, bias_at, kept, *weights, *tables, KEEPS=norm.before is not None, **constants)


def pack_by_kernel(
    grads: Heads, rows: torch.Tensor, rotary: Rotary | None, norm: HeadNorm | None = None
) -> torch.Tensor:
    """pack in one read and one write, whatever the strides of dq, dk and dv."""
    from ..kernels.attention_layout import pack_kernel
    from ..kernels.attention_norm import pack_normed_kernel

    grads = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in grads)  # type: ignore[assignment]
    packed = grads[0].new_empty(len(rows), grads[0].shape[1], heads_of(grads).features)
    tables, constants, blocks = _launch(packed, rows, grads, rotary, norm)
    count = packed.shape[0] * packed.shape[1]
    if norm is None:
        pack_kernel[count, blocks](packed, *tables, **constants)
        return packed
    programs, (*weights, eps) = -(-count // NORM_ROWS), _of_norm(norm.norm)
    sums = packed.new_empty(programs * blocks, *norm.weight_gradients.shape, dtype=torch.float32)
    pack_normed_kernel[programs, blocks](
        packed, norm.before, *weights, sums, eps, count, *tables, ROWS=NORM_ROWS, **constants
    )
    norm.weight_gradients += sums.sum(0)  # each program's sum, then the sum of these
    return packed


def _launch(
    packed: torch.Tensor, rows: torch.Tensor, tensors: Heads, rotary: Rotary | None, norm: HeadNorm | None
) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """What all kernels are told of rows, angles (packed, if there are none), q, k and v; their constants; blocks of heads."""
    heads, rotated = heads_of(tensors), 0 if rotary is None else rotary.cos.shape[-1]
    angles = (packed, packed) if rotary is None else (rotary.cos.contiguous(), rotary.sin.contiguous())
    count = heads.query + 2 * heads.kv
    constants = dict(
        HEADS=count, PER_GROUP=heads.per_group, DIM=heads.dim, ROTATED=rotated, BLOCK_H=BLOCK_H,
        INTERLEAVED=rotary is not None and rotary.interleaved,
    )  # fmt: skip
    if norm is None:  # widths of what these kernels take at once: pairs, and features that are not rotated
        constants |= dict(PAIRS=_power_of_two(rotated // 2), REST=_power_of_two(heads.dim - rotated))
    else:
        constants |= dict(ZERO_CENTERED=norm.norm.zero_centered, WIDTH=_power_of_two(heads.dim))
    places = [stride for tensor in tensors for stride in tensor.stride()[:3]]
    return (rows, *angles, *tensors, packed.shape[1], *places), constants, -(-count // BLOCK_H)


def _of_norm(norm: QkNorm) -> tuple[torch.Tensor, torch.Tensor, float]:
    return norm.q_weight.contiguous(), norm.k_weight.contiguous(), float(norm.eps)


def _power_of_two(size: int) -> int:
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
