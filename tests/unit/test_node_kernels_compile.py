"""The kernels between nodes compile for Hopper, few registers each: NCCL's run beside them."""

from __future__ import annotations

import importlib.util
import re
from concurrent.futures import ProcessPoolExecutor

import pytest

pytest.importorskip("triton")

from overlap_train.kernels.add_blocks import MOST_OF_64_KIB, ON_ALL_SMS, ON_FEW_SMS, WARPS
from tests.unit import hopper_ptx

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's compiler")


@pytest.mark.parametrize(
    ("count", "nbytes"),
    [(1, ON_FEW_SMS), (7, ON_FEW_SMS), (MOST_OF_64_KIB, ON_FEW_SMS), (2, ON_ALL_SMS), (22, ON_ALL_SMS)],
)
def test_a_sum_compiles_without_atomics_and_spills(compiling: ProcessPoolExecutor, count: int, nbytes: int) -> None:
    """On the SMs that products leave it, and on all as the last one, of 22 other blocks on 16 nodes of 8."""
    aligned = ("own_ptr", "received_ptr", "order_ptr", "y_ptr", "size", "pitch")
    constants = dict(COUNT=count, BLOCK=nbytes // 2, num_warps=WARPS, divisible=aligned)
    submitted = compiling.submit(hopper_ptx.compiled_portable, "add_blocks", "add_blocks_kernel", **constants)
    added = submitted.result(120)
    assert re.search(r"st\.global", added) and not re.search(r"\b(atom|red)\.", added)
    assert "0 bytes spill stores, 0 bytes spill loads" in hopper_ptx.resources(added)


def test_a_wait_compiles_without_spills(compiling: ProcessPoolExecutor) -> None:
    constants = dict(CHUNKS=1, TIMED=True, BLOCK=1024)
    waits = compiling.submit(hopper_ptx.compiled_portable, "signal", "wait_kernel", **constants).result(120)
    assert ".local" not in waits
