"""The kernels between nodes compile for Hopper, few registers each: NCCL's run beside them."""

from __future__ import annotations

import importlib.util
import re
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.unit import hopper_ptx

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's compiler")


def test_they_compile_without_atomics_in_the_sum(compiling: ProcessPoolExecutor) -> None:
    added, waits = (
        compiling.submit(hopper_ptx.compiled_portable, *kernel, **constants).result(120)
        for kernel, constants in (
            (("add_blocks", "add_blocks_kernel"), dict(COUNT=3, BLOCK=1024)),
            (("signal", "wait_kernel"), dict(CHUNKS=1, TIMED=True, BLOCK=1024)),
        )
    )
    assert re.search(r"st\.global", added) and not re.search(r"\b(atom|red)\.", added)
    assert ".local" not in added and ".local" not in waits, "registers spill"
