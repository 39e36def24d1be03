"""Kernels that move numbers, between received rows and attention, or make fp8 of them, compile for Hopper, without atomics."""

from __future__ import annotations

import importlib.util
import re
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests.unit import hopper_ptx

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's compiler")

HEADS = dict(HEADS=10, PER_GROUP=3, DIM=128, BLOCK_H=8)
KERNELS = {
    ("attention_layout", "unpack_kernel"): dict(bias=True, PAIRS=64, REST=64),
    ("attention_layout", "pack_kernel"): dict(PAIRS=64, REST=64),
}


@pytest.mark.parametrize("rotated", [0, 64])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel[1])
def test_it_compiles_and_no_order_depends_on_timing(
    compiling: ProcessPoolExecutor, kernel: tuple[str, str], rotated: int
) -> None:
    constants = HEADS | KERNELS[kernel] | {"ROTATED": rotated, "INTERLEAVED": False}
    ptx = compiling.submit(hopper_ptx.compiled_portable, *kernel, **constants).result(120)
    assert re.search(r"st\.global", ptx) and not re.search(r"\b(atom|red)\.", ptx)


TILE = dict(BLOCK_M=128, BLOCK_K=128, num_warps=4, divisible=("m", "k"))
BLOCKS = dict(MOST=448.0, ROWS=True, COLUMNS=True, BLOCK=128, num_warps=8)
BLOCKS["divisible"] = (
    "x_ptr", "by_rows_ptr", "by_columns_ptr", "row_scales_ptr", "column_scales_ptr", "m", "k", "stride",
)  # fmt: skip
ROWS = dict(ROWS=32, BLOCK=128, num_warps=4, divisible=("x_ptr", "by_rows_ptr", "scales_ptr", "k", "stride"))
CONVERTS = r"cvt\.rn\.satfinite\.e4m3x2\.f32"


ONE_SCALE = dict(MOST=448.0, PADDED=256, GIVEN=True, TELLS=False, ROWS=True, COLUMNS=True, **TILE)
ONE_SCALE["divisible"] = ("x_ptr", "by_rows_ptr", "by_columns_ptr", "m", "k")
SQUARES = {**BLOCKS, "divisible": (*ONE_SCALE["divisible"], "height")}


@pytest.mark.parametrize(
    ("kernel", "constants", "shows"),
    [
        ("quantize_kernel", ONE_SCALE, CONVERTS),
        ("quantize_pieces_kernel", {**BLOCKS, "PACKED": True}, CONVERTS),
        ("quantize_pieces_kernel", {**BLOCKS, "PACKED": False}, CONVERTS),
        ("quantize_squares_kernel", SQUARES, CONVERTS),
        ("pack_rows_kernel", ROWS | {"MOST": 448.0}, CONVERTS),
        ("unpack_rows_kernel", ROWS, r"st\.global\.v4"),
        ("amax_kernel", dict(BLOCK=16384, num_warps=16, divisible=("x_ptr", "size")), r"ld\.global\.v4"),
        ("transpose_kernel", TILE, r"st\.global"),
    ],
)
def test_fp8_is_made_without_atomics(
    compiling: ProcessPoolExecutor, kernel: str, constants: dict[str, Any], shows: str
) -> None:
    ptx = compiling.submit(hopper_ptx.compiled_portable, "quantize", kernel, **constants).result(120)
    assert re.search(shows, ptx) and not re.search(r"\b(atom|red)\.", ptx)


def _conversions_that_serve_both(ptx: str) -> set[str]:
    """Registers with a pair of converted numbers that is both merged with the next pair, to be stored by rows, and shifted, to be
    stored by columns: what ptxas 12.8 and 12.9 get wrong (benchmarks/notes.md)."""
    pairs = set(re.findall(r"cvt\.rn\.satfinite\.e\dm\dx2\.f32\s+(%rs\d+)", ptx))
    put_together = re.findall(r"mov\.b32\s+%r\d+, \{(%rs\d+), (%rs\d+)\}", ptx)
    merged = {pair for two in put_together if pairs.issuperset(two) for pair in two}
    assert merged
    return merged & set(re.findall(r"shr\.[us]16\s+%rs\d+, (%rs\d+), 8", ptx))


@pytest.mark.parametrize("data", ["*bf16", "*fp32"])
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        ("quantize_kernel", ONE_SCALE),
        ("quantize_kernel", ONE_SCALE | {"rounded_to": "*fp8e5"}),
        ("quantize_squares_kernel", SQUARES),
    ],
)
def test_no_conversion_serves_both_rows_and_columns(
    compiling: ProcessPoolExecutor, kernel: str, constants: dict[str, Any], data: str
) -> None:
    """Unlike one that multiplies by one scale for both, of fp32."""
    told = dict(constants, data=data)
    assert not _conversions_that_serve_both(
        compiling.submit(hopper_ptx.compiled_conversion, kernel, **told).result(120)
    )
    if data == "*fp32":
        planted = compiling.submit(hopper_ptx.compiled_conversion, kernel, planted=True, **told).result(120)
        assert _conversions_that_serve_both(planted)
