"""The kernels between received rows and attention compile for Hopper, which the interpreter cannot tell, without atomics."""

from __future__ import annotations

import importlib.util
import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.unit import hopper_ptx

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's compiler")

HEADS = dict(HEADS=10, PER_GROUP=3, DIM=128, BLOCK_H=8)
KERNELS = {
    ("attention_layout", "unpack_kernel"): dict(HAS_BIAS=True, PAIRS=64, REST=64),
    ("attention_layout", "pack_kernel"): dict(PAIRS=64, REST=64),
    ("attention_norm", "unpack_normed_kernel"): dict(HAS_BIAS=True, KEEPS=True, ZERO_CENTERED=True, WIDTH=128),
    ("attention_norm", "pack_normed_kernel"): dict(ZERO_CENTERED=True, WIDTH=128, ROWS=16),
}


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """Where kernels are compiled: the protocol tests of this one interpret them."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=hopper_ptx.leave_the_interpreter) as pool:
        yield pool


@pytest.mark.parametrize("rotated", [0, 64])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel[1])
def test_it_compiles_and_no_order_depends_on_timing(
    process: ProcessPoolExecutor, kernel: tuple[str, str], rotated: int
) -> None:
    constants = HEADS | KERNELS[kernel] | {"ROTATED": rotated, "INTERLEAVED": False}
    ptx = process.submit(hopper_ptx.compiled_portable, *kernel, **constants).result(120)
    assert re.search(r"st\.global", ptx) and not re.search(r"\b(atom|red)\.", ptx)
