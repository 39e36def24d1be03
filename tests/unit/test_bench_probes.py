"""Probes that need no GPU: host time of a call, and kernels compiled ahead under the keys that a GPU's process looks for."""

from __future__ import annotations

import ast
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
METHODS = ("low_latency", "direct", "fused", "collective", "sequence")
ROWS = {
    *itertools.product(("column", "row", "both"), ("fprop", "bprop"), (*METHODS, "F.linear")),
}
# What Triton is asked to compile for linears of two ranks.
AHEAD = """
import sys
from types import SimpleNamespace
sys.path[:0] = [".", "benchmarks/probes"]
import compile_ahead, triton

asked = []

def warmup(kernel, **launch):
    asked.append((kernel.fn.__name__, launch.get("WORLD")))
    return SimpleNamespace(hash=str(len(asked)))

triton.JITFunction.warmup = warmup
with compile_ahead.compiling(world=2):
    for method in ("fused", "direct"):
        compile_ahead.run(1024, 512, 256, method, world=2)
print(asked)
"""


def _run(*program: str) -> str:
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    settings.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, *program], cwd=ROOT, env=settings, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "host time" not in run.stderr, "each kernel is packed: what the probe measures is the packed launch"
    return run.stdout


def test_host_time_has_a_row_for_each_operator_pass_and_method() -> None:
    lines = _run("benchmarks/probes/host_time.py", "--rounds", "1", "--calls", "2").splitlines()
    assert [tuple(line.split()[:3]) for line in lines[1:]] == sorted(ROWS)


def test_kernels_are_compiled_ahead() -> None:
    asked = ast.literal_eval(_run("-c", AHEAD).splitlines()[-1])
    products = {(name, world) for name, world in asked if "gemm" in name}
    assert {("hopper_all_gather_gemm_kernel", 2), ("hopper_gemm_reduce_scatter_kernel", 2)} <= products
