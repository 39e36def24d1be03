"""Products of one-byte operands, e4m3 or e5m2, for Hopper: what they are scaled by, and sums in full fp32.

    y [M, N] = a [M, K] @ b [N, K].T * a_scale * b_scale

Both lie along K, and a panel has 128 of K. The tensor cores add products of one-byte numbers up with 14 bits. Where that is too
few, each panel's product is added in fp32 by the multiplying warps. While one group adds, the other's products keep the tensor
cores busy. A tile of 256 columns is multiplied in halves: its sums take 128 registers a thread, a half's product 64.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hopper_stores import split_tile
from .hopper_tiles import PARTS, b_place, multiply_tile, no_product, pass_tile

# SCALING
UNSCALED = gl.constexpr(0)  # operands of two bytes
TENSORS = gl.constexpr(1)  # a scale of all of a, one of all of b; the tensor cores add up
PRECISE = gl.constexpr(2)  # the same, with sums in fp32


@gluon.jit
def scale_of_product(scales, SCALING: gl.constexpr):
    """What the product is multiplied by at its end. scales: of a and of b."""
    scale = 1.0
    if SCALING != UNSCALED:
        scale = gl.load(scales[0]) * gl.load(scales[1])
    return scale


@gluon.jit
def whole_product(panels, step, b_desc, b_half_desc, k_steps, scale, PART: gl.constexpr, ROWS: gl.constexpr,
                  COLS: gl.constexpr, STAGES: gl.constexpr, B_IS_NK: gl.constexpr, SCALING: gl.constexpr):  # fmt: skip
    """One multiplying group: the (left, right) halves [ROWS, COLS / 2] fp32 of strip PART of a tile."""
    if SCALING == PRECISE:
        left, right, step = _multiply_panels(panels, step, b_half_desc, k_steps, 2, PART, ROWS, COLS // 2, STAGES)
    else:
        acc, step = multiply_tile(panels, step, b_desc, k_steps, PART, ROWS, COLS, STAGES, B_IS_NK)
        left, right = split_tile(acc, ROWS, COLS)
    if SCALING != UNSCALED:
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
    if SCALING == PRECISE:
        half, _, step = _multiply_panels(panels, step, b_half_desc, k_steps, 1, PART, ROWS, COLS, STAGES)
    else:
        half, step = multiply_tile(panels, step, b_half_desc, k_steps, PART, ROWS, COLS, STAGES, B_IS_NK)
    if SCALING != UNSCALED:
        half = half * scale
    return half, step


@gluon.jit
def _multiply_panels(panels, step, half_desc, k_steps, HALVES: gl.constexpr, PART: gl.constexpr, ROWS: gl.constexpr,
                     COLS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """As multiply_tile, for one or two HALVES [ROWS, COLS] of a tile, each panel's product added in fp32."""
    _, _, panel_full, panel_free = panels
    left = no_product(panels, ROWS, COLS)
    right = no_product(panels, ROWS, COLS)
    acc = no_product(panels, ROWS, COLS)
    for _ in range(k_steps):
        stage = step % STAGES
        mbarrier.wait(panel_full.index(stage), step // STAGES & 1)
        token = _panel_product(panels, stage, half_desc, acc, 0, PART)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[token])
        left += acc
        if HALVES == 2:
            token = _panel_product(panels, stage, half_desc, acc, 1, PART)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=[token])
            right += acc
        mbarrier.arrive(panel_free.index(stage), count=1)
        step += 1
    return left, right, step


@gluon.jit
def _panel_product(panels, stage, half_desc, acc, HALF: gl.constexpr, PART: gl.constexpr):
    """[ROWS, COLS] fp32 of one panel, while it is computed, in the place of acc."""
    b = b_place(panels, stage, half_desc, HALF).permute((1, 0))
    return warpgroup_mma(panels[0].index(stage * PARTS + PART), b, acc, use_acc=False, is_async=True)
