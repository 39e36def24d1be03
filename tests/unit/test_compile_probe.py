"""The probe that compiles ahead: across nodes it tells kernels what a GPU's machine tells them, and each is compiled once."""

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


def _run(script: str) -> list[tuple[str, int, str, dict[str, Any]]]:
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    settings.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=settings, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    found: list[tuple[str, int, str, dict[str, Any]]] = ast.literal_eval(run.stdout.splitlines()[-1])
    return found
