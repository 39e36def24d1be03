"""Tensors as fp8 with one scale each, which CPUs and GPUs find alike, to the bit.

    scale = largest number of the format / largest element       x8 = x * scale, rounded and saturated       x is about x8 / scale

Source: TransformerEngine's current scaling, whose formulas these are, but for infinite elements, which it hides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2  # of inputs and weights, and of gradients


@dataclass(frozen=True)
class Quantized:
    """x [M, K] in fp8. rows: as x lies; columns: [K, M], contiguous; None: not asked for. inverse: fp32 [1], 1 / scale."""

    rows: torch.Tensor | None
    columns: torch.Tensor | None
    inverse: torch.Tensor


def largest(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of x, fp32 [1]; NaN, if one of them is."""
    return x.abs().amax().float().view(1)


def quantized(
    x: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = False
) -> Quantized:
    """x [M, K] as numbers of `dtype`. amax: fp32 [W], the largest magnitudes of the parts of the tensor that share the scale."""
    most, amax = torch.finfo(dtype).max, amax.amax().view(1)
    scale = torch.where(amax == 0, 1.0, most / amax).clamp(max=torch.finfo(torch.float32).max)
    scale = torch.where(amax.isinf(), torch.nan, scale)  # what is infinite, or no number, shows on every rank
    x8 = (x.float() * scale).clamp(-most, most).to(dtype)
    return Quantized(x8 if rows else None, transposed(x8) if columns else None, 1 / scale)


def transposed(x8: torch.Tensor) -> torch.Tensor:
    """x8 [M, K] as [K, M], contiguous."""
    return x8.t().contiguous()
