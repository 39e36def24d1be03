"""Matrices as fp8 with one scale each, which CPUs and GPUs find alike, to the bit; blocks.py has those with one for each block.

    scale = largest number of the format / largest element       x8 = x * scale, rounded and saturated       x is about x8 / scale

Source: TransformerEngine's current scaling, whose formulas these are, but for infinite elements, which it hides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from ..gpu.launch import Launch
from ..group.domain import OverlapDomain

FORWARD = torch.float8_e4m3fn  # of inputs and weights
GRADIENT = {"tensorwise": torch.float8_e5m2, "tensorwise_e4m3": torch.float8_e4m3fn}  # by OverlapConfig.fp8
_PARTS = 128  # about as many as a GPU has SMs, the same on all ranks
AMAX_BYTES = 4 * _PARTS
_BLOCK, _TILE = 16384, dict(BLOCK_M=128, BLOCK_K=128, num_warps=4)  # what a program reads at once


class Quantized(NamedTuple):
    """x [M, K] in fp8. rows: as x lies; columns: [K, M], contiguous; None: not asked for. inverse: fp32 [1], 1 / scale.

    With a scale for each square (blocks.py) inverse is [M/128, K/128 up to a multiple of 4], and inverse_of_columns
    [K/128, M/128 up to a multiple of 4].
    """

    rows: torch.Tensor | None
    columns: torch.Tensor | None
    inverse: torch.Tensor
    inverse_of_columns: torch.Tensor | None = None


class Given(NamedTuple):
    """A scale that its owner works out, fp32 [1]. amax, fp32 [1]: is raised to the largest element of what is made by it (NaN is
    none); None: it is told nothing."""

    scale: torch.Tensor
    amax: torch.Tensor | None


class GivenScales(NamedTuple):
    """Those of a linear in fp8 "tensorwise" whose owner gives them, as `weight.fp8_scales`."""

    x: Given
    w: Given
    dy: Given


class Fp8Copies:
    """What operators in fp8 make of a weight, kept for their next calls: `weight.fp8_copies = Fp8Copies()` asks for it.

    Whoever changes the weight calls `clear()` before the next call. A weight with another address, version, shape or device is
    noticed, but writing through `.data`, as optimizers do, changes none of these. made: None, or w [N, K] by rows for forward
    and, once a call wants dx, by columns for backward: two bytes an element. CUDA graphs neither take nor keep it.

    inverse: fp32 [1], of a weight that is in e4m3 itself: what it stands for is its numbers times this.
    """

    def __init__(self, inverse: torch.Tensor | None = None) -> None:
        self.inverse = inverse
        self.clear()

    def __reduce__(self) -> tuple[Any, ...]:  # another weight's, as a copy or from a file: empty
        return Fp8Copies, ()

    def clear(self) -> None:
        """Let the next call make anew what it needs."""
        self.made: Quantized | None = None
        self._made_of: object = None

    def of(self, domain: OverlapDomain, w: torch.Tensor, columns: bool, make: Make | None = None) -> Quantized:
        """w [N, K] by rows, and by columns where they are asked for, now or before: both in one read. make: how; None: with one
        scale."""
        of = (w.data_ptr(), 0 if w.is_inference() else w._version, w.shape, w.device, make)
        if self.made is None or self._made_of != of:
            self._made_of = of
            if self.inverse is None:
                self.made = (make or _with_one_scale)(domain, w, True, columns)
            else:
                self.made = Quantized(w.detach(), None, self.inverse)
        if columns and self.made.columns is None:
            self.made = _with_columns(domain, self.made)
        return self.made


Make: TypeAlias = Callable[[OverlapDomain, torch.Tensor, bool, bool], Quantized]  # of a matrix by rows, by columns


def _with_one_scale(domain: OverlapDomain, w: torch.Tensor, rows: bool, columns: bool) -> Quantized:
    return quantized(domain, w, largest(domain, w), FORWARD, rows, columns)


def _with_columns(domain: OverlapDomain, made: Quantized) -> Quantized:
    assert made.rows is not None
    inverse = turned_scales(made.inverse, *made.rows.shape) if made.inverse.dim() == 2 else None
    return made._replace(columns=transposed(domain, made.rows), inverse_of_columns=inverse)


def turned_scales(inverse: torch.Tensor, m: int, k: int) -> torch.Tensor:
    """Inverse scales of the squares of matrices [m, k], one below the other, for their columns; see Quantized."""
    squares, pieces = m // 128, k // 128
    turned = inverse.new_zeros(len(inverse) // squares, pieces, -(-m // 512) * 4)
    turned[..., :squares] = inverse[:, :pieces].view(-1, squares, pieces).mT
    return turned.flatten(0, 1)


def largest(domain: OverlapDomain, x: torch.Tensor) -> torch.Tensor:
    """The largest magnitudes of 128 parts of x, fp32 [128], on CPUs that of x, [1]; NaN, if one element is."""
    if not domain.on_gpu:
        return x.abs().amax().float().view(1)
    x = x.contiguous()
    amax = torch.empty(_PARTS, dtype=torch.float32, device=x.device)
    x_at = x.data_ptr()  # what is allocated here is aligned
    domain.launches.run(("amax", x.shape, x.dtype, x_at % 16), (x_at, amax.data_ptr()), _amax_launch, x, amax)
    return amax


def quantized(
    domain: OverlapDomain, x: torch.Tensor, by: torch.Tensor | Given, dtype: torch.dtype, rows: bool = True,
    columns: bool = False,
) -> Quantized:  # fmt: skip
    """x [M, K] as numbers of `dtype`. by: fp32 [parts], the largest of all parts of the tensor that share the scale; or that."""
    if not domain.on_gpu:
        return quantized_by_torch(x, by, dtype, rows, columns)
    amax, told = (by.scale, by.amax) if isinstance(by, Given) else (by, None)  # told: the kernel raises it
    x = x.contiguous()
    by_rows = x.new_empty(x.shape, dtype=dtype) if rows else None
    by_columns = x.new_empty(x.shape[::-1], dtype=dtype) if columns else None
    made = Quantized(by_rows, by_columns, torch.empty(1, dtype=torch.float32, device=x.device))
    one = by_rows if by_columns is None else by_columns
    assert one is not None, "rows, columns, or both"
    is_given, tells = isinstance(by, Given), told is not None
    tensors = (x, amax, one if by_rows is None else by_rows, one, made.inverse, amax if told is None else told)
    values = tuple(tensor.data_ptr() for tensor in tensors)
    unaligned = values[0] % 16, values[1] % 16, values[-1] % 16
    key = ("quantize", x.shape, x.dtype, dtype, rows, columns, is_given, tells, amax.numel(), *unaligned)
    domain.launches.run(key, values, _quantize_launch, *tensors, rows, columns, is_given, tells)
    return made


def quantized_by_torch(
    x: torch.Tensor, by: torch.Tensor | Given, dtype: torch.dtype, rows: bool = True, columns: bool = False
) -> Quantized:
    """As quantized, in operations of torch."""
    most = torch.finfo(dtype).max
    if isinstance(by, Given):
        scale = by.scale.view(1)
        if by.amax is not None:
            torch.maximum(by.amax, x.abs().nan_to_num(0.0, torch.inf).amax().float().view(1), out=by.amax)
    else:
        amax = by.amax().view(1)
        # A number over a tensor would be its reciprocal, times the number.
        scale = torch.full_like(amax, most).div(amax)
        scale = torch.where(amax == 0, 1.0, scale).clamp(max=torch.finfo(torch.float32).max)
        scale = torch.where(amax.isinf(), torch.nan, scale)  # what is infinite, or no number, shows on every rank
    x8 = (x.float() * scale).clamp(-most, most).to(dtype)
    return Quantized(x8 if rows else None, x8.t().contiguous() if columns else None, 1 / scale)


def transposed(domain: OverlapDomain, x8: torch.Tensor) -> torch.Tensor:
    """x8 [M, K], whose rows may lie apart, as [K, M], contiguous."""
    if not domain.on_gpu:
        return x8.t().contiguous()
    y8 = x8.new_empty(x8.shape[::-1])
    x_at, key = x8.data_ptr(), ("transpose", x8.shape, x8.stride(0), x8.data_ptr() % 16)
    domain.launches.run(key, (x_at, y8.data_ptr()), _transpose_launch, x8, y8)
    return y8


def _amax_launch(x: torch.Tensor, amax: torch.Tensor) -> Launch:
    from ..kernels.quantize import amax_kernel

    arguments = dict(x_ptr=x, amax_ptr=amax, size=x.numel())
    return Launch(
        amax_kernel, (amax.numel(),), arguments, dict(BLOCK=_BLOCK, num_warps=16), (("x_ptr",), ("amax_ptr",))
    )


def _quantize_launch(
    x: torch.Tensor, amax: torch.Tensor, by_rows: torch.Tensor, by_columns: torch.Tensor, inverse: torch.Tensor,
    told: torch.Tensor, rows: bool, columns: bool, is_given: bool, tells: bool,
) -> Launch:  # fmt: skip
    from ..kernels.quantize import quantize_kernel

    names = ("x_ptr", "amax_ptr", "by_rows_ptr", "by_columns_ptr", "inverse_ptr", "told_ptr")
    (m, k), count = x.shape, amax.numel()
    arguments = dict(zip(names, (x, amax, by_rows, by_columns, inverse, told), strict=True))
    arguments |= dict(m=m, k=k, count=count)
    constants = dict(MOST=torch.finfo(by_rows.dtype).max, PADDED=1 << (count - 1).bit_length(), GIVEN=is_given)
    constants |= dict(TELLS=tells, ROWS=rows, COLUMNS=columns, **_TILE)
    return Launch(quantize_kernel, _grid(m, k), arguments, constants, tuple((name,) for name in names))


def _transpose_launch(x8: torch.Tensor, y8: torch.Tensor) -> Launch:
    from ..kernels.quantize import transpose_kernel

    m, k = x8.shape
    arguments = dict(x_ptr=x8.view(torch.uint8), y_ptr=y8.view(torch.uint8), m=m, k=k, stride=x8.stride(0))
    return Launch(transpose_kernel, _grid(m, k), arguments, dict(_TILE), (("x_ptr",), ("y_ptr",)))


def _grid(m: int, k: int) -> tuple[int]:
    return (-(-m // _TILE["BLOCK_M"]) * -(-k // _TILE["BLOCK_K"]),)
