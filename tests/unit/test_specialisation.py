"""Launches of equal kinds run the same binary: compared with what Triton itself decides."""

from __future__ import annotations

import importlib.util
import itertools
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_train.gpu.ptx_check import Verifier, kinds
from tests.unit import hopper_ptx

SIZES = (1, 2, 5, 15, 16, 17, 32, 48, 2**31 - 1, 2**31, 2**32, 2**33 + 1, 2**63 - 1, 2**63, 2**63 + 16, -1, -16)


def _launches() -> list[dict[str, Any]]:
    whole, half = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
    tensors = (whole, whole[1:], half, half[8:])
    numbers = [(size, 3) for size in SIZES] + [(5, scale) for scale in (1, 16, 2.0, 0.5)]
    return [
        dict(x_ptr=x, size=size, scale=scale, BLOCK=32) for x, (size, scale) in itertools.product(tensors, numbers)
    ] + [dict(x_ptr=whole, size=5, scale=3, BLOCK=block, num_warps=warps) for block in (32, 64) for warps in (1, 4)]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's compiler")
def test_equal_kinds_are_equal_binaries(compiling: ProcessPoolExecutor) -> None:
    launches, options = _launches(), ("BLOCK", "num_warps")
    hashes = compiling.submit(hopper_ptx.binaries_of, launches).result(240)
    found: dict[Any, set[str]] = {}
    for launch, binary in zip(launches, hashes, strict=True):
        constants = {name: launch.pop(name) for name in options if name in launch}
        found.setdefault(kinds(launch, constants), set()).add(binary)
    assert all(len(binaries) == 1 for binaries in found.values())
    assert len(set(hashes)) <= len(found) < len(launches) / 2, "most of these launches need no question"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's compiler")
def test_one_binary_waits_for_all_rows_of_a_dtype(compiling: ProcessPoolExecutor) -> None:
    """CUDA may put off the load of another one until the GPU has nothing to do."""
    words, rows = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.bfloat16)
    pointers = dict.fromkeys(("signals_ptr", "epoch_ptr", "abort_ptr", "record_ptr"), words)
    numbers = dict(limit=600_000_000_000, rank=1, count=1, CHUNKS=1, TIMED=True, BLOCK=1024, num_warps=1)
    launches = [
        dict(**pointers, **numbers, row_ptr=row, row_size=size, first=place, first_chunk=place)
        for row, size, place in itertools.product((rows, rows[1:]), (1, 16, 37), (0, 1, 16))
    ]
    submitted = compiling.submit(hopper_ptx.binaries_of, launches, "signal", "wait_kernel")
    assert len(set(submitted.result(240))) == 1


def test_triton_is_asked_once_for_launches_of_a_kind() -> None:
    asked: list[int] = []

    class Kernel:
        def warmup(self, grid: tuple[int], rows: int) -> SimpleNamespace:
            asked.append(rows)
            return SimpleNamespace(metadata=SimpleNamespace(name="reduce_partials_kernel"), asm={"ptx": ""}, hash="")

    verifier, kernel = Verifier(), Kernel()
    for rows in (5, 6, 7, 16, 32, 1):
        verifier.verify(kernel, (1,), dict(rows=rows), {})
    verifier.verify(Kernel(), (1,), dict(rows=5), {})
    assert asked == [5, 16, 1, 5]
