"""Matrices as e4m3 with a scale for each block, a power of two, which CPUs and GPUs find alike, to the bit; and packed rows, in
which such scales travel with their numbers.

    scale = 2 ** floor(log2(448 / largest element of the block))       1, where that is 0 or infinite

Blocks are squares of 128 x 128 in weights, else pieces of 128 elements along the contraction: of a matrix by rows 1 x 128, by
columns 128 x 1. These are two roundings of one matrix.

A packed row is K numbers, then K/32 bytes of inverse scales in fp32, then what fills it up to 16 bytes. By rows these scales are
the row's own. By columns 128 rows have K scales together, one of each column; the first row those of the first K/128 columns. So
both have one shape, and one copy under one signal moves numbers and scales.

Source: TransformerEngine's Float8BlockQuantizer with its defaults, whose formula this is. NaN is no largest element, and infinity
becomes 448, with the scale 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..gpu.launch import Launch
from ..group.domain import OverlapDomain
from ..select.method import packed_bytes
from .quantize import FORWARD, Quantized, transposed, turned_scales

BLOCK = 128
_MOST = 448.0
_ROWS = 32  # that a program packs at once
_PROGRAMS = 1024  # several for each SM, whatever there is to pack
# Warps of a kernel whose program has 128 x 128 numbers in registers. Few find largest elements of columns faster: rows and
# columns of 8192 x 7168 take 105 us by 4, 111 by 8; rows alone 55 and 51 (H200).
_WARPS_WITH_COLUMNS, _WARPS = 4, 8
_PIECES = ("x_ptr", "by_rows_ptr", "row_scales_ptr", "by_columns_ptr", "column_scales_ptr")
_SQUARES = ("x_ptr", "by_rows_ptr", "by_columns_ptr", "scales_ptr")


class Pieces(NamedTuple):
    """x [M, K] as the library multiplies it: by columns numbers e4m3 [K, M], inverse fp32 [M/128, K]; by rows [M, K], [K/128, M],
    or, where the rows of each rank are multiplied apart, inverse [W, K/128, M/W]."""

    numbers: torch.Tensor
    inverse: torch.Tensor


def new_packed(x: torch.Tensor, twice: bool = False) -> torch.Tensor:
    """Room for packed rows of x [M, K]; twice: and for packed columns behind them, in the same rows."""
    return x.new_empty(len(x), packed_bytes(x.shape[1]) * (1 + twice), dtype=FORWARD)


def new_columns(x: torch.Tensor) -> Pieces:
    """Room for x [M, K] by columns."""
    return Pieces(
        x.new_empty(x.shape[::-1], dtype=FORWARD), x.new_empty(len(x) // BLOCK, x.shape[1], dtype=torch.float32)
    )


def new_rows(x: torch.Tensor, ranks: int = 1) -> Pieces:
    """Room for x [M, K] by rows. ranks: whose rows are multiplied apart."""
    shape = (x.shape[1] // BLOCK, len(x) // ranks)
    inverse = x.new_empty(shape if ranks == 1 else (ranks, *shape), dtype=torch.float32)
    return Pieces(x.new_empty(x.shape, dtype=FORWARD), inverse)


def tails(packed: torch.Tensor, features: int) -> torch.Tensor:
    """The inverse scales of packed rows: [M, K/128], rows apart."""
    return packed[:, features : features + features // 32].view(torch.float32)


def columns_of(domain: OverlapDomain, packed: torch.Tensor, features: int) -> Pieces:
    """Packed columns of all ranks [M, *], as products want them."""
    inverse = tails(packed, features).contiguous().view(-1, features)
    return Pieces(transposed(domain, packed[:, :features]), inverse)


def write_pieces(
    domain: OverlapDomain, x: torch.Tensor, rows: torch.Tensor | Pieces | None, columns: torch.Tensor | Pieces | None
) -> None:
    """Fill rows and columns, both packed, or neither, with x [M, K] in pieces. None: not asked for."""
    if not domain.on_gpu:
        _write_by_torch(x, rows, columns)
        return
    x, k = x.contiguous(), x.shape[1]
    outputs = [
        (one, tails(one, k)) if isinstance(one, torch.Tensor) else one for one in (rows, columns) if one is not None
    ]
    tensors = dict(zip(_PIECES, (x, *outputs[0], *outputs[-1]), strict=True))
    is_packed = isinstance(rows, torch.Tensor) or isinstance(columns, torch.Tensor)
    warps = _WARPS if columns is None else _WARPS_WITH_COLUMNS
    told = dict(ROWS=rows is not None, COLUMNS=columns is not None, PACKED=is_packed, num_warps=warps)
    stride = outputs[0][0].stride(0) if is_packed else outputs[0][1].shape[-1]
    _run(domain, "quantize_pieces_kernel", tensors, stride, told)


def packed_rows(domain: OverlapDomain, x: torch.Tensor) -> torch.Tensor:
    """x [M, K], any number of rows, in packed rows: bytes, since what moves them knows no fp8."""
    packed = new_packed(x)
    if domain.on_gpu:
        _run_by_rows(domain, "pack_rows_kernel", x.contiguous(), packed)
    else:
        _write_by_torch(x, packed, None)
    return packed.view(torch.uint8)


def unpacked_rows(domain: OverlapDomain, packed: torch.Tensor, features: int, dtype: torch.dtype) -> torch.Tensor:
    """What packed rows, bytes [M, *], stand for: [M, K], exactly in bf16, since scales are powers of two, except beyond its
    range."""
    packed = packed.view(FORWARD)
    if not domain.on_gpu:
        return times(packed[:, :features], tails(packed, features)).to(dtype)
    x = packed.new_empty(len(packed), features, dtype=dtype)
    _run_by_rows(domain, "unpack_rows_kernel", x, packed)
    return x


def squares(
    domain: OverlapDomain, w: torch.Tensor, rows: bool, columns: bool, height: int | None = None
) -> Quantized:  # fmt: skip
    """w [N, K] in squares, by rows, by columns or both. height: of each of the matrices that lie in w one below the other; their
    columns do so, too."""
    (n, k), height = w.shape, height or len(w)
    inverse = w.new_zeros(n // BLOCK, -(-k // (4 * BLOCK)) * 4, dtype=torch.float32)
    if domain.on_gpu:
        by_rows = w.new_empty(n, k, dtype=FORWARD) if rows else inverse
        by_columns = w.new_empty(n * k // height, height, dtype=FORWARD) if columns else inverse
        tensors = dict(zip(_SQUARES, (w.contiguous(), by_rows, by_columns, inverse), strict=True))
        told = dict(ROWS=rows, COLUMNS=columns, num_warps=_WARPS)
        _run(domain, "quantize_squares_kernel", tensors, inverse.stride(0), told, dict(height=height))
    else:
        by_rows, of_squares = _by_torch(w, BLOCK)
        inverse[:, : k // BLOCK] = of_squares
        by_columns = by_rows.view(-1, height, k).mT.flatten(0, 1) if columns else by_rows
    turned = turned_scales(inverse, height, k) if columns else None
    return Quantized(by_rows if rows else None, by_columns if columns else None, inverse, turned)


def times(numbers: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """numbers [M, K] by inverse scales [M, K/128], in fp32."""
    return numbers.float() * inverse.repeat_interleave(BLOCK, 1)


def _by_torch(x: torch.Tensor, height: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers [M, K], inverse scales [M/height, K/128]) of blocks of height x 128."""
    x, (m, k) = x.float(), x.shape
    amax = x.abs().nan_to_num(0.0, torch.inf).view(m // height, height, k // BLOCK, BLOCK).amax((1, 3))
    scale = torch.full_like(amax, _MOST).div(amax).clamp(max=torch.finfo(torch.float32).max)
    scale = (scale.view(torch.int32) & -8388608).view(torch.float32)  # its exponent alone
    scale = torch.where((amax == 0) | amax.isinf(), 1.0, scale)
    return times(x, scale.repeat_interleave(height, 0)).clamp(-_MOST, _MOST).to(FORWARD), 1 / scale


def _write_by_torch(x: torch.Tensor, rows: torch.Tensor | Pieces | None, columns: torch.Tensor | Pieces | None) -> None:
    (m, k), by_columns = x.shape, None if columns is None else _by_torch(x.t().contiguous(), 1)
    if rows is not None:
        numbers, inverse = _by_torch(x.contiguous(), 1)
        if isinstance(rows, torch.Tensor):
            rows[:, :k].copy_(numbers)
            tails(rows, k).copy_(inverse)
        else:
            rows.numbers.copy_(numbers)
            apart = inverse.view(-1, rows.inverse.shape[-1], k // BLOCK).transpose(1, 2)
            rows.inverse.copy_(apart.reshape(rows.inverse.shape))
    if by_columns is None or columns is None:
        return
    numbers, inverse = by_columns[0], by_columns[1].t()
    if isinstance(columns, torch.Tensor):
        columns[:, :k].copy_(numbers.t())
        tails(columns, k).copy_(inverse.reshape(m, k // BLOCK))
    else:
        columns.numbers.copy_(numbers)
        columns.inverse.copy_(inverse)


def _run(
    domain: OverlapDomain, kernel: str, tensors: dict[str, torch.Tensor], stride: int, told: dict[str, int],
    others: dict[str, int] | None = None,
) -> None:  # fmt: skip
    """Launch a kernel of kernels/quantize.py that has a program for each square of tensors["x_ptr"]. others: numbers that it is
    told."""
    x, values = tensors["x_ptr"], tuple(tensor.data_ptr() for tensor in tensors.values())
    key = (kernel, x.shape, x.dtype, stride, *told.values(), *(others or {}).values(), values[0] % 16)
    domain.launches.run(key, values, _launch, kernel, tensors, stride, told, others or {})


def _launch(
    kernel: str, tensors: dict[str, torch.Tensor], stride: int, told: dict[str, int], others: dict[str, int]
) -> Launch:
    from ..kernels import quantize as kernels

    m, k = tensors["x_ptr"].shape
    constants = dict(MOST=_MOST, BLOCK=BLOCK, **told)
    arguments, replaced = dict(tensors, m=m, k=k, stride=stride, **others), tuple((name,) for name in tensors)
    return Launch(getattr(kernels, kernel), (m // BLOCK * (k // BLOCK),), arguments, constants, replaced)


def _run_by_rows(domain: OverlapDomain, kernel: str, x: torch.Tensor, packed: torch.Tensor) -> None:
    """Launch a kernel between x [M, K] and packed rows; one launch serves any M."""
    values = (x.data_ptr(), packed.data_ptr(), packed.data_ptr() + x.shape[1], len(x))
    domain.launches.run((kernel, x.shape[1], x.dtype, values[0] % 16), values, _launch_by_rows, kernel, x, packed)


def _launch_by_rows(kernel: str, x: torch.Tensor, packed: torch.Tensor) -> Launch:
    from ..kernels import quantize as kernels

    k = x.shape[1]
    tensors = dict(x_ptr=x, by_rows_ptr=packed, scales_ptr=tails(packed, k))
    constants = dict(BLOCK=BLOCK, ROWS=_ROWS, num_warps=4) | ({"MOST": _MOST} if kernel == "pack_rows_kernel" else {})
    replaced = (*((name,) for name in tensors), ("m",))
    return Launch(
        getattr(kernels, kernel),
        (_PROGRAMS,),
        dict(tensors, m=len(x), k=k, stride=packed.shape[1]),
        constants,
        replaced,
    )
