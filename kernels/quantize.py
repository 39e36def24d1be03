"""Matrices as fp8 with one scale each, or one for each block, by rows, by columns, or both in one read.

    scale = largest number of the format / largest element     x8 = x * scale, rounded to nearest even, saturated

Of a whole matrix, largest elements are kept as bits, whose order as integers is that of magnitudes, with infinity and NaN above
all numbers. Scales of blocks are powers of two, rounded down.
"""

import triton
import triton.language as tl


@triton.jit
def amax_kernel(x_ptr, amax_ptr, size, BLOCK: tl.constexpr):
    """amax [programs] fp32: the largest magnitude of each program's part of x [size]."""
    largest = tl.zeros((BLOCK,), tl.int32)
    blocks = (size - 1) // BLOCK + 1  # tl.cdiv's sum overflows just below 2^31
    for block in range(tl.program_id(0).to(tl.int64), blocks, tl.num_programs(0)):
        at = tl.arange(0, BLOCK).to(tl.int64) + block * BLOCK
        x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x).to(tl.int32, bitcast=True))
    tl.store(amax_ptr + tl.program_id(0), tl.max(largest, axis=0).to(tl.float32, bitcast=True))


@triton.jit
def scale_of(amax_ptr, count, MOST: tl.constexpr, PADDED: tl.constexpr):
    """The scale for the largest of amax [count]: 1 where all is zero, NaN where something is infinite or no number."""
    at = tl.arange(0, PADDED)
    bits = tl.load(amax_ptr + at, mask=at < count, other=0.0).to(tl.int32, bitcast=True)
    amax = tl.max(bits, axis=0).to(tl.float32, bitcast=True)
    # of tiny elements it would be infinite
    scale = tl.minimum(tl.div_rn(MOST + amax * 0.0, amax), 3.4028234663852886e38)
    return tl.where(amax == 0.0, 1.0, tl.where(amax < float("inf"), scale, float("nan")))


@triton.jit
def scaled(x, scale, MOST: tl.constexpr, FORMAT: tl.constexpr = tl.float8e4nv):
    """x * scale in FORMAT. Infinity becomes the largest number, NaN stays."""
    return tl.clamp(x * scale, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL).to(FORMAT)


@triton.jit
def apart(scale):
    """scale, as a number that compilers do not know to be the same: they see through a copy, not through a reduction. So numbers
    by columns are converted apart from those by rows. Where one conversion serves both, ptxas 12.8 and 12.9 store columns from
    registers that are not written yet; a test of the PTX finds such conversions."""
    return tl.max(tl.zeros((32,), tl.float32) + scale, axis=0)


@triton.jit
def magnitude(x):
    """|x|, 0 of NaN: one instruction, where a comparison and a choice are two."""
    return tl.maximum(tl.abs(x), 0.0)


@triton.jit(do_not_specialize=["count"])
def quantize_kernel(
    x_ptr, amax_ptr, by_rows_ptr, by_columns_ptr, inverse_ptr, told_ptr, m, k, count, MOST: tl.constexpr,
    PADDED: tl.constexpr, GIVEN: tl.constexpr, TELLS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x [M, K] -> rows [M, K], columns [K, M], inverse [1] fp32 = 1 / scale. A program for each tile [BLOCK_M, BLOCK_K].

    amax [count] fp32: of the parts of the tensor. ROWS, COLUMNS: which of the two are written. GIVEN: amax is the scale itself.
    TELLS: told [1] fp32, not negative, is raised to the largest magnitude, of which NaN is none.
    """
    scale = tl.load(amax_ptr) if GIVEN else scale_of(amax_ptr, count, MOST, PADDED)
    tiles_k = tl.cdiv(k, BLOCK_K)
    row = tl.program_id(0) // tiles_k * BLOCK_M + tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
    col = tl.program_id(0) % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    inside = (row < m) & (col < k)
    x = tl.load(x_ptr + row * k + col, mask=inside, other=0.0).to(tl.float32)
    if TELLS:
        largest = tl.max(tl.max(magnitude(x), axis=1), axis=0)
        bits = told_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.atomic_max(bits, largest.to(tl.int32, bitcast=True), sem="relaxed")
    FORMAT: tl.constexpr = by_rows_ptr.dtype.element_ty
    if ROWS:
        tl.store(by_rows_ptr + row * k + col, scaled(x, scale, MOST, FORMAT), mask=inside)
    if COLUMNS:
        x8 = scaled(x, apart(scale) if ROWS else scale, MOST, FORMAT)
        tl.store(by_columns_ptr + col.to(tl.int64) * m + row, x8, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(inverse_ptr, tl.div_rn(1.0 + 0.0 * scale, scale))


@triton.jit
def transpose_kernel(x_ptr, y_ptr, m, k, stride, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """x [M, K], whose rows lie `stride` apart -> y [K, M], of one byte an element. A program for each tile [BLOCK_M, BLOCK_K]."""
    tiles_k = tl.cdiv(k, BLOCK_K)
    row = tl.program_id(0) // tiles_k * BLOCK_M + tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
    col = tl.program_id(0) % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    inside = (row < m) & (col < k)
    tl.store(y_ptr + col.to(tl.int64) * m + row, tl.load(x_ptr + row * stride + col, mask=inside), mask=inside)


@triton.jit
def scale_of_block(amax, MOST: tl.constexpr):
    """The scales of blocks with the largest magnitudes amax, of which NaN is none: 1 where they are 0 or infinite."""
    scale = tl.minimum(tl.div_rn(MOST + amax * 0.0, amax), 3.4028234663852886e38)
    power = (scale.to(tl.int32, bitcast=True) & -8388608).to(tl.float32, bitcast=True)  # its exponent alone
    return tl.where((amax == 0.0) | (amax == float("inf")), 1.0, power)


@triton.jit
def start_of(tile_m, tile_k, BLOCK: tl.constexpr):
    """(first row, first column, rows [BLOCK, 1] and columns [1, BLOCK] from there on) of a square. What is added for each element
    has 32 bits, enough for matrices with less than 2^23 rows and columns, also where packed rows hold two roundings."""
    first_m, first_k = (tile_m * BLOCK).to(tl.int64), (tile_k * BLOCK).to(tl.int64)
    return first_m, first_k, tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]


@triton.jit
def quantize_pieces_kernel(
    x_ptr, by_rows_ptr, row_scales_ptr, by_columns_ptr, column_scales_ptr, m, k, stride, MOST: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [M, K] -> its pieces of BLOCK elements along K, and along M, each with its own scale. A program for each square.

    Packed rows lie `stride` bytes apart. Behind the numbers of a row are K/BLOCK inverse scales, from row_scales on: its own. Of
    packed columns BLOCK rows have those of K columns there, one after the other. ROWS, COLUMNS: which are written: PACKED, or
    rows [M, K] with row_scales [M/stride, K/BLOCK, stride], and columns [K, M] with column_scales [M/BLOCK, K].
    """
    pieces = k // BLOCK
    tile_m, tile_k = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    first_m, first_k, row, col = start_of(tile_m, tile_k, BLOCK)
    start, inside = first_m * k + first_k, row * k + col
    size = magnitude(tl.load(x_ptr + start + inside).to(tl.float32))
    if ROWS:
        row_scale = scale_of_block(tl.max(size, axis=1), MOST)
    if COLUMNS:
        column_scale = scale_of_block(tl.max(size, axis=0), MOST)
    # Out of L1, not kept from above: half as many registers, and columns of 8192 x 7168 take 65 us instead of 89 (H200).
    x = tl.load(x_ptr + start + inside, cache_modifier=".ca").to(tl.float32)
    packed = first_m * stride + first_k + (row * stride + col)
    each = tl.arange(0, BLOCK)
    if ROWS:
        tl.store(by_rows_ptr + (packed if PACKED else start + inside), scaled(x, row_scale[:, None], MOST))
        if PACKED:
            place = (first_m + each) * (stride // 4) + tile_k
        else:
            part = tile_m * BLOCK // stride
            place = (part * (pieces - 1) + tile_k).to(tl.int64) * stride + first_m + each
        tl.store(row_scales_ptr + place, tl.div_rn(1.0 + 0.0 * row_scale, row_scale))
    if COLUMNS:
        turned = first_k * m + first_m + (col * m + row)
        tl.store(by_columns_ptr + (packed if PACKED else turned), scaled(x, column_scale[None, :], MOST))
        if PACKED:
            column = first_k + each
            place = (first_m + column // pieces) * (stride // 4) + column % pieces
        else:
            place = tile_m.to(tl.int64) * k + first_k + each
        tl.store(column_scales_ptr + place, tl.div_rn(1.0 + 0.0 * column_scale, column_scale))


@triton.jit
def quantize_squares_kernel(
    x_ptr, by_rows_ptr, by_columns_ptr, scales_ptr, m, k, stride, height, MOST: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [M, K], matrices of `height` rows one below the other -> rows [M, K], and columns [K, height] of each of them, with a
    scale for each square: inverse scales [M/BLOCK, stride]."""
    tile_m, tile_k = tl.program_id(0) // (k // BLOCK), tl.program_id(0) % (k // BLOCK)
    first_m, first_k, row, col = start_of(tile_m, tile_k, BLOCK)
    at = first_m * k + first_k + (row * k + col)
    loaded = tl.load(x_ptr + at)
    x = loaded.to(tl.float32)
    scale = scale_of_block(tl.max(tl.max(magnitude(x), axis=1), axis=0), MOST)
    if ROWS:
        tl.store(by_rows_ptr + at, scaled(x, scale, MOST))
    if COLUMNS:
        # Turned before it is rounded: rows and columns of 8192 x 7168 take 72 us instead of 105 (H200).
        x8 = scaled(tl.trans(loaded).to(tl.float32), apart(scale) if ROWS else scale, MOST)
        start = (first_m // height * k + first_k) * height + first_m % height
        tl.store(by_columns_ptr + start + tl.trans(col * height + row), x8)
    tl.store(scales_ptr + tile_m * stride + tile_k, tl.div_rn(1.0 + 0.0 * scale, scale))


@triton.jit(do_not_specialize=["m"])
def pack_rows_kernel(
    x_ptr, by_rows_ptr, scales_ptr, m, k, stride, MOST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """x [M, K] -> packed rows, as quantize_pieces_kernel has them, of any number of rows."""
    pieces = k // BLOCK
    for tile in range(tl.program_id(0), tl.cdiv(m, ROWS) * pieces, tl.num_programs(0)):
        row = tile // pieces * ROWS + tl.arange(0, ROWS).to(tl.int64)
        col = tile % pieces * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row[:, None] * k + col[None, :], mask=(row < m)[:, None], other=0.0).to(tl.float32)
        scale = scale_of_block(tl.max(magnitude(x), axis=1), MOST)
        tl.store(
            by_rows_ptr + row[:, None] * stride + col[None, :], scaled(x, scale[:, None], MOST), mask=(row < m)[:, None]
        )
        tl.store(scales_ptr + row * (stride // 4) + tile % pieces, tl.div_rn(1.0 + 0.0 * scale, scale), mask=row < m)


@triton.jit(do_not_specialize=["m"])
def unpack_rows_kernel(by_rows_ptr, scales_ptr, x_ptr, m, k, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """What packed rows stand for: x [M, K]. In bf16 exactly, since scales are powers of two, except beyond its range."""
    pieces = k // BLOCK
    for tile in range(tl.program_id(0), tl.cdiv(m, ROWS) * pieces, tl.num_programs(0)):
        row = tile // pieces * ROWS + tl.arange(0, ROWS).to(tl.int64)
        col = tile % pieces * BLOCK + tl.arange(0, BLOCK)
        inside = (row < m)[:, None]
        x = tl.load(by_rows_ptr + row[:, None] * stride + col[None, :], mask=inside).to(tl.float32)
        x *= tl.load(scales_ptr + row * (stride // 4) + tile % pieces, mask=row < m)[:, None]
        tl.store(x_ptr + row[:, None] * k + col[None, :], x.to(x_ptr.dtype.element_ty), mask=inside)
