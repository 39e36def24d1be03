"""The probe that compiles ahead: across nodes it tells kernels what a GPU's machine tells them, each is compiled once, and under
the key by which a process on a GPU, whose kernels come in another order, looks for it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
ACROSS_NODES = """
import sys, tempfile
from pathlib import Path
sys.path[:0] = [".", "benchmarks/probes"]
import compile_ahead, compile_tests, torch
from tested_calls import Task

told = []

def noted(self, kernel, grid, arguments, constants):
    told.append((task.operator, rank, kernel.fn.__name__, {name: constants.get(name) for name in ("WORLD", "LOCAL", "TIMED")}))

compile_ahead.Compiling._compile = noted
claims = Path(tempfile.mkdtemp())
for operator in ("column", "row", "to_heads", "to_rows"):
    for shape in (((8, 2), 64, 32), ((3, 5), 37, 29)):
        task = Task(4, operator, "fused", torch.bfloat16, shape, node_ranks=2)
        for rank in task.ranks:
            compile_tests.call(task, rank, claims)
print(told)
"""


def test_kernels_across_nodes_are_told_of_both_once() -> None:
    told = _run(ACROSS_NODES)
    kernels = {name for _, _, name, _ in told}
    products = ("all_gather_gemm_kernel", "gemm_reduce_scatter_kernel", "all_to_all_gemm_kernel")
    assert {family + name for family in ("", "hopper_") for name in products} < kernels
    assert {"wait_kernel", "next_epoch_kernel", "add_blocks_kernel"} < kernels and "barrier_kernel" not in kernels
    gemms = [constants for _, _, name, constants in told if "gemm" in name]
    assert all((said["WORLD"], said["LOCAL"]) == (4, 2) for said in gemms)
    assert len([name for _, _, name, _ in told if name == "next_epoch_kernel"]) == 1, (
        "claimed by the call that came first"
    )
    assert any(rank for _, rank, _, _ in told), "a rank's own block begins elsewhere than that of rank 0"


# What Triton is asked to compile, as [(kernel, its key)].
KEYS = """
import sys, tempfile
from pathlib import Path
from types import SimpleNamespace
sys.path[:0] = [".", "benchmarks/probes"]
import triton

asked = []

def warmup(kernel, **launch):
    asked.append((kernel.fn.__name__, kernel.cache_key))
    return SimpleNamespace(hash=str(len(asked)))

triton.JITFunction.warmup = warmup
"""
OF_THE_PROBE = """
import compile_ahead, compile_tests, torch
from tested_calls import Task

for operator in ("column", "to_heads"):
    for shape in (((8, 2), 64, 32), ((3, 5), 37, 29)):
        task = Task(4, operator, "fused", torch.bfloat16, shape, chunks=2, node_ranks=2)
        compile_tests.call(task, 0, Path(tempfile.mkdtemp()))
print(asked)
"""
OF_A_GPU = """
from overlap_train.gpu.ptx_check import Verifier
from overlap_train.kernels import (
    add_blocks, all_gather_gemm, all_to_all_gemm, arrivals, gemm_reduce_scatter, hopper_all_gather_gemm,
    hopper_all_to_all_gemm, hopper_gemm_reduce_scatter, own_block, signal,
)

Verifier._check = lambda *compiled: None
modules = (hopper_gemm_reduce_scatter, gemm_reduce_scatter, hopper_all_to_all_gemm, all_to_all_gemm, arrivals, own_block,
           add_blocks, hopper_all_gather_gemm, all_gather_gemm, signal)
for module in modules:
    for name, kernel in vars(module).items():
        if name.endswith("_kernel"):
            Verifier().verify(kernel, (1,), {}, {})
print(asked)
"""


def test_a_kernel_has_one_key_whatever_was_compiled_before_it() -> None:
    """Triton's own depends on that: tests on GPUs compiled 74 kernels that the probe had compiled, too."""
    ahead, there = set(_run(KEYS + OF_THE_PROBE)), set(_run(KEYS + OF_A_GPU))
    kernels = {name for name, _ in ahead}
    assert {"count_arrivals_kernel", "wait_and_keep_kernel", "hopper_all_gather_gemm_kernel"} < kernels
    assert ahead <= there, sorted({name for name, _ in ahead - there})


def _run(script: str) -> list[tuple[Any, ...]]:
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    settings.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=settings, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    found: list[tuple[Any, ...]] = ast.literal_eval(run.stdout.splitlines()[-1])
    return found
