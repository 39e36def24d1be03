"""Products of one-byte operands, e4m3 or e5m2, for Hopper: what they are scaled by, and sums in full fp32.

    y [M, N] = a [M, K] @ b [N, K].T * a_scale * b_scale

Both lie along K, and a panel has 128 of K. The tensor cores add products of one-byte numbers up with 14 bits. Where that is too
few, each panel's product is added in fp32 by the multiplying warps. While one group adds, the other's products keep the tensor
cores busy. A tile of 256 columns is multiplied in halves: its sums take 128 registers a thread, a half's product 64.

With scales of blocks (BLOCKS) a panel's product is scaled as it is added. A block is 128 of K of one row of a, or of the 128 rows
of b that half a tile has. While a panel is multiplied, each thread loads the scales of the next but one: those of the next came
late from L2, and GEMM + RS had 0.975 of cuBLASLt's speed instead of 0.993. Of rows that peers send they are loaded behind
wait_for_panel: the loading warp has acquired the rows' signals by then.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hopper_stores import split_tile
from .hopper_tiles import PARTS, b_place, multiply_tile, no_product, pass_tile, wait_for_panel

# SCALING
UNSCALED = gl.constexpr(0)  # operands of two bytes
TENSORS = gl.constexpr(1)  # a scale of all of a, one of all of b; the tensor cores add up
PRECISE = gl.constexpr(2)  # the same, with sums in fp32
BLOCKS = gl.constexpr(3)  # a scale of each block, with sums in fp32
BLOCK = gl.constexpr(128)


@gluon.constexpr_function
def registers(SCALING, others):
    """Registers of a thread: of the second multiplying group, then of each of the `others` groups. With those of the first group,
    as many as the second's, they are 504 (ops/launch.py). With Triton 3.8 a loading warp that has 40 spills up to 60 bytes; with
    scales of blocks the multiplying groups need 232."""
    multiplying = 232 if SCALING == BLOCKS else 224
    return [multiplying, *[504 - 2 * multiplying] * others]


@gluon.jit
def scale_of_product(scales, SCALING: gl.constexpr):
    """What the product is multiplied by at its end. scales: of a and of b."""
    scale = 1.0
    if SCALING == TENSORS or SCALING == PRECISE:
        scale = gl.load(scales[0]) * gl.load(scales[1])
    return scale


@gluon.jit
def scales_of_strip(a_ptr, a_row, a_step, b_ptr, first, rows, col, n, k):
    """Where the scales of blocks of a strip and of a tile's columns lie, which take the place of scale_of_product's.

    a_ptr: of row 0, with a_row elements from row to row and a_step from panel to panel. first: the strip's first row; so many
    `rows` of its chunk begin there, perhaps none, but some before. b_ptr: a row for 128 columns, filled up to 4 panels. col: the
    tile's first column.
    """
    b_row = gl.cdiv(k, 4 * BLOCK) * 4
    of_b = b_ptr + col // BLOCK * b_row
    return a_ptr + gl.cast(first, gl.int64) * a_row, rows - 1, a_row, a_step, of_b, gl.where(col + BLOCK < n, b_row, 0)


@gluon.jit
def whole_product(panels, step, b_desc, b_half_desc, k_steps, scale, PART: gl.constexpr, ROWS: gl.constexpr,
                  COLS: gl.constexpr, STAGES: gl.constexpr, B_IS_NK: gl.constexpr, SCALING: gl.constexpr):  # fmt: skip
    """One multiplying group: the (left, right) halves [ROWS, COLS / 2] fp32 of strip PART of a tile."""
    if SCALING >= PRECISE:
        left, right, step = _multiply_panels(panels, step, b_half_desc, k_steps, scale, 2, PART, ROWS, COLS // 2, STAGES,
                                             SCALING)  # fmt: skip
    else:
        acc, step = multiply_tile(panels, step, b_desc, k_steps, PART, ROWS, COLS, STAGES, B_IS_NK)
        left, right = split_tile(acc, ROWS, COLS)
    if SCALING == TENSORS or SCALING == PRECISE:
        left, right = left * scale, right * scale
    return left, right, step


@gluon.jit
def no_whole_product(panels, step, k_steps, ROWS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr):
    """As whole_product, of a strip without rows: zeros, while the panels go by."""
    acc, step = pass_tile(panels, step, k_steps, ROWS, COLS, STAGES)
    left, right = split_tile(acc, ROWS, COLS)
    return left, right, step


@gluon.jit
def half_product(panels, step, b_half_desc, k_steps, scale, PART: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
                 STAGES: gl.constexpr, B_IS_NK: gl.constexpr, SCALING: gl.constexpr):  # fmt: skip
    """One multiplying group: strip PART [ROWS, COLS] fp32 of half a tile."""
    if SCALING >= PRECISE:
        half, _, step = _multiply_panels(panels, step, b_half_desc, k_steps, scale, 1, PART, ROWS, COLS, STAGES,
                                         SCALING)  # fmt: skip
    else:
        half, step = multiply_tile(panels, step, b_half_desc, k_steps, PART, ROWS, COLS, STAGES, B_IS_NK)
    if SCALING == TENSORS or SCALING == PRECISE:
        half = half * scale
    return half, step


@gluon.jit
def _multiply_panels(panels, step, half_desc, k_steps, scale, HALVES: gl.constexpr, PART: gl.constexpr, ROWS: gl.constexpr,
                     COLS: gl.constexpr, STAGES: gl.constexpr, SCALING: gl.constexpr):  # fmt: skip
    """As multiply_tile, for one or two HALVES [ROWS, COLS] of a tile, each panel's product added in fp32. scale: with BLOCKS see
    scales_of_strip."""
    left = no_product(panels, ROWS, COLS)
    right = no_product(panels, ROWS, COLS)
    acc = no_product(panels, ROWS, COLS)
    # Of even and of odd panels: a copy from one to the other would wait until the latter has come.
    even = _scales_of_panel(scale, 0, k_steps, left, HALVES, SCALING)
    odd = _scales_of_panel(scale, 1, k_steps, left, HALVES, SCALING)
    EVERY: gl.constexpr = 2 if SCALING == BLOCKS else 1  # in pairs, PRECISE spills 1088 bytes
    for k in range(0, k_steps, EVERY):
        left, right, acc, even, step = _add_panel(panels, step, half_desc, k, k_steps, scale, even, left, right, acc, HALVES,
                                                  PART, STAGES, SCALING)  # fmt: skip
        if EVERY == 2 and k + 1 < k_steps:
            left, right, acc, odd, step = _add_panel(panels, step, half_desc, k + 1, k_steps, scale, odd, left, right, acc,
                                                     HALVES, PART, STAGES, SCALING)  # fmt: skip
    return left, right, step


@gluon.jit
def _add_panel(panels, step, half_desc, k, k_steps, scale, scales, left, right, acc, HALVES: gl.constexpr, PART: gl.constexpr,
               STAGES: gl.constexpr, SCALING: gl.constexpr):  # fmt: skip
    """(left, right) and the product of panel k; acc: where it is computed. scales: its own; returned are those of panel k + 2."""
    panel_free, stage = panels[3], step % STAGES
    wait_for_panel(panels, step, STAGES)
    token = _panel_product(panels, stage, half_desc, acc, 0, PART)
    of_rows, of_left, of_right = scales
    by_left, by_right = of_rows * of_left, of_rows * of_right
    scales = _scales_of_panel(scale, k + 2, k_steps, left, HALVES, SCALING)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[token])
    left = _plus_scaled(left, acc, by_left, SCALING)
    if HALVES == 2:
        token = _panel_product(panels, stage, half_desc, acc, 1, PART)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[token])
    mbarrier.arrive(panel_free.index(stage), count=1)
    if HALVES == 2:
        right = _plus_scaled(right, acc, by_right, SCALING)
    return left, right, acc, scales, step + 1


@gluon.jit
def _panel_product(panels, stage, half_desc, acc, HALF: gl.constexpr, PART: gl.constexpr):
    """[ROWS, COLS] fp32 of one panel, while it is computed, in the place of acc."""
    b = b_place(panels, stage, half_desc, HALF).permute((1, 0))
    return warpgroup_mma(panels[0].index(stage * PARTS + PART), b, acc, use_acc=False, is_async=True)


@gluon.jit
def _scales_of_panel(at, k, k_steps, total, HALVES: gl.constexpr, SCALING: gl.constexpr):
    """Those of panel k, or of the last one: (of the strip's rows, of the left half's columns, of the right one's). at:
    scales_of_strip's. Without BLOCKS they mean nothing."""
    of_rows, of_left, of_right = gl.zeros((total.shape[0],), gl.float32, gl.SliceLayout(1, total.type.layout)), 0.0, 0.0
    if SCALING == BLOCKS:
        a_ptr, last, a_row, a_step, b_ptr, b_row = at
        k = gl.minimum(k, k_steps - 1)
        rows = gl.minimum(gl.arange(0, total.shape[0], gl.SliceLayout(1, total.type.layout)), last)
        of_rows = gl.load(a_ptr + rows * a_row + k * a_step)
        of_left = gl.load(b_ptr + k)
        of_right = gl.load(b_ptr + b_row + k) if HALVES == 2 else of_left
    return of_rows, of_left, of_right


@gluon.jit
def _plus_scaled(total, acc, by, SCALING: gl.constexpr):
    """total + acc, a panel's product [ROWS, COLS], with BLOCKS by the scales of its rows. As an instruction that LLVM leaves
    where it is: it put all additions after the products of both halves, and 270 bytes spilled."""
    if SCALING == BLOCKS:
        by = by.expand_dims(1).broadcast_to(acc.shape)
        total = gl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [acc, by, total], dtype=gl.float32, is_pure=False, pack=1
        )
    else:
        total += acc
    return total
