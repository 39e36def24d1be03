"""The kernels between received rows and attention compile for Hopper, which the interpreter cannot tell, without atomics."""

from __future__ import annotations

import importlib.util
import re
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.unit import hopper_ptx

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's compiler")

HEADS = dict(HEADS=10, PER_GROUP=3, DIM=128, BLOCK_H=8)
KERNELS = {
    ("attention_layout", "unpack_kernel"): dict(bias=True, HAS_BIAS=True, PAIRS=64, REST=64),
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
