"""Products of one-byte operands, e4m3 or e5m2, for Hopper: what they are scaled by, and sums in full fp32.

    y [M, N] = sum over k of  a [M, K] * a_scale  x  b [N, K] * b_scale

Both lie along K, and a panel has 128 of K. The tensor cores add products of one-byte numbers up with 14 bits. Where that is too
few, each panel's product is scaled and added in fp32 by the multiplying warps. While one group adds, the other's products keep
the tensor cores busy. A tile of 256 columns is multiplied in halves: its sums take 128 registers a thread, a half's product 64.

Scales of panels may lie anywhere at equal distances. Rows that are gathered carry them: a row is its K bytes, then its K / 128
scales in fp32, filled up to 32 bytes. So a copy moves both, and one signal says that both are here. Each thread reads those it
needs after it has issued the product that they scale, which takes longer. The loading warp has waited for the rows by then, and
the barrier of their panel tells the multiplying warps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hopper_stores import split_tile
from .hopper_tiles import PARTS, b_place, multiply_tile, no_product, pass_tile

# SCALING: what a scale is of.
UNSCALED = gl.constexpr(0)  # operands of two bytes
TENSORS = gl.constexpr(1)  # all of a, all of b; the tensor cores add up
PRECISE = gl.constexpr(2)  # the same, with sums in fp32
BLOCKS = gl.constexpr(3)  # 128 of K of one row of a, and of 128 rows of b
VECTORS = gl.constexpr(4)  # 128 of K of one row of a, and of one row of b
BLOCK = gl.constexpr(128)


@gluon.jit
def scale_of_tensors(scales, SCALING: gl.constexpr):
    """What the product is multiplied by at its end. scales: see scales_at."""
    scale = 1.0
    if SCALING == TENSORS or SCALING == PRECISE:
        scale = gl.load(scales[0]) * gl.load(scales[2])
    return scale


@gluon.jit
def scales_at(a_ptr, scales, row, rows, col, n, SCALING: gl.constexpr):
    """Where the scales of a strip of a, and of a tile's columns, lie.

    a_ptr: scales of the matrix whose row `row` is the strip's first; so many `rows` are left in its chunk. col: the tile's first.
    scales: (.., .., those of b, a's from row to row and from panel to panel, b's from row to row and from panel to panel), in
    elements. With BLOCKS b has a row of scales for 128 of its rows.
    """
    _, _, b_ptr, a_row, a_step, b_row, b_step = scales
    WIDTH: gl.constexpr = BLOCK if SCALING == BLOCKS else 1
    of_a = (a_ptr + row * a_row, rows - 1, a_row, a_step)
    return of_a, (b_ptr + col // WIDTH * b_row, (n - 1 - col) // WIDTH, b_row, b_step)


@gluon.jit
def whole_product(panels, step, b_desc, b_half_desc, k_steps, scale, at, PART: gl.constexpr, ROWS: gl.constexpr,
                  COLS: gl.constexpr, STAGES: gl.constexpr, B_IS_NK: gl.constexpr, SCALING: gl.constexpr):  # fmt: skip
    """One multiplying group: the (left, right) halves [ROWS, COLS / 2] fp32 of strip PART of a tile."""
    if SCALING >= PRECISE and COLS == 256:  # the whole product would take 128 registers
        left, right, step = _multiply_panels(
            panels, step, b_half_desc, k_steps, at, 2, PART, ROWS, COLS // 2, STAGES, SCALING
        )
    elif SCALING >= PRECISE:
        acc, _, step = _multiply_panels(panels, step, b_desc, k_steps, at, 1, PART, ROWS, COLS, STAGES, SCALING)
        left, right = split_tile(acc, ROWS, COLS)
    else:
        acc, step = multiply_tile(panels, step, b_desc, k_steps, PART, ROWS, COLS, STAGES, B_IS_NK)
        left, right = split_tile(acc, ROWS, COLS)
    if SCALING == TENSORS or SCALING == PRECISE:
        left, right = left * scale, right * scale
    return left, right, step


@gluon.jit
def no_whole_product(panels, step, k_steps, ROWS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr,
                     SCALING: gl.constexpr):  # fmt: skip
    """As whole_product, of a strip without rows: zeros, while the panels go by."""
    if SCALING >= PRECISE and COLS == 256:
        left, step = pass_tile(panels, step, k_steps, ROWS, COLS // 2, STAGES)
        right = left
    else:
        acc, step = pass_tile(panels, step, k_steps, ROWS, COLS, STAGES)
        left, right = split_tile(acc, ROWS, COLS)
    return left, right, step


@gluon.jit
def half_product(panels, step, b_half_desc, k_steps, scale, at, PART: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
                 STAGES: gl.constexpr, B_IS_NK: gl.constexpr, SCALING: gl.constexpr):  # fmt: skip
    """One multiplying group: strip PART [ROWS, COLS] fp32 of half a tile."""
    if SCALING >= PRECISE:
        half, _, step = _multiply_panels(panels, step, b_half_desc, k_steps, at, 1, PART, ROWS, COLS, STAGES, SCALING)
    else:
        half, step = multiply_tile(panels, step, b_half_desc, k_steps, PART, ROWS, COLS, STAGES, B_IS_NK)
    if SCALING == TENSORS or SCALING == PRECISE:
        half = half * scale
    return half, step


@gluon.jit
def _multiply_panels(panels, step, half_desc, k_steps, at, HALVES: gl.constexpr, PART: gl.constexpr, ROWS: gl.constexpr,
                     COLS: gl.constexpr, STAGES: gl.constexpr, SCALING: gl.constexpr):  # fmt: skip
    """As multiply_tile, for one or two HALVES [ROWS, COLS] of a tile, each panel's product scaled and added in fp32."""
    _, _, panel_full, panel_free = panels
    left = no_product(panels, ROWS, COLS)
    right = no_product(panels, ROWS, COLS)
    acc = no_product(panels, ROWS, COLS)
    for k in range(k_steps):
        stage = step % STAGES
        mbarrier.wait(panel_full.index(stage), step // STAGES & 1)
        token = _panel_product(panels, stage, half_desc, acc, 0, PART)
        a_scale = _scales_of_rows(at, k, left, ROWS, SCALING)
        b_scale = _scales_of_cols(at, k, left, 0, COLS, SCALING)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[token])
        left = _add_scaled(left, acc, a_scale, b_scale, SCALING)
        if HALVES == 2:
            token = _panel_product(panels, stage, half_desc, acc, 1, PART)
            b_scale = _scales_of_cols(at, k, left, 1, COLS, SCALING)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=[token])
            right = _add_scaled(right, acc, a_scale, b_scale, SCALING)
        mbarrier.arrive(panel_free.index(stage), count=1)
        step += 1
    return left, right, step


@gluon.jit
def _panel_product(panels, stage, half_desc, acc, HALF: gl.constexpr, PART: gl.constexpr):
    """[ROWS, COLS] fp32 of one panel, while it is computed, in the place of acc."""
    b = b_place(panels, stage, half_desc, HALF).permute((1, 0))
    return warpgroup_mma(panels[0].index(stage * PARTS + PART), b, acc, use_acc=False, is_async=True)


@gluon.jit
def _scales_of_rows(at, k, total, ROWS: gl.constexpr, SCALING: gl.constexpr):
    """Those of a strip of a, for panel k."""
    scale = 1.0
    if SCALING >= BLOCKS:
        a_ptr, last, row, step = at[0]
        rows = gl.minimum(gl.arange(0, ROWS, gl.SliceLayout(1, total.type.layout)), last)
        scale = gl.load(a_ptr + rows * row + k * step)
    return scale


@gluon.jit
def _scales_of_cols(at, k, total, HALF: gl.constexpr, COLS: gl.constexpr, SCALING: gl.constexpr):
    """Those of one half of a tile, for panel k."""
    scale = 1.0
    if SCALING >= BLOCKS:
        b_ptr, last, row, step = at[1]
        if SCALING == BLOCKS:
            scale = gl.load(b_ptr + (gl.minimum(HALF * COLS // BLOCK, last) * row + k * step))
        else:
            cols = gl.minimum(HALF * COLS + gl.arange(0, COLS, gl.SliceLayout(0, total.type.layout)), last)
            scale = gl.load(b_ptr + (cols * row + k * step))
    return scale


@gluon.jit
def _add_scaled(total, acc, a_scale, b_scale, SCALING: gl.constexpr):
    """total + a panel's product, scaled."""
    if SCALING == BLOCKS:
        acc = acc * (a_scale * b_scale).expand_dims(1)
    elif SCALING == VECTORS:
        acc = acc * a_scale.expand_dims(1) * b_scale.expand_dims(0)
    return total + acc
