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
    *itertools.product(("column", "row"), ("alone",), METHODS),
    *itertools.product(("column", "row", "both"), ("fprop", "bprop"), (*METHODS, "F.linear")),
}
# What Triton is asked to compile for operators across two nodes of two ranks, as [(kernel, ranks, ranks of a node)].
AHEAD = """
import sys, tempfile
from pathlib import Path
from types import SimpleNamespace
sys.path[:0] = [".", "benchmarks/probes"]
import compile_ahead, compile_tests, torch, triton
from tested_calls import Task

asked = []

def warmup(kernel, **launch):
    asked.append((kernel.fn.__name__, launch.get("WORLD"), launch.get("LOCAL")))
    return SimpleNamespace(hash=str(len(asked)))

triton.JITFunction.warmup = warmup
claims = Path(tempfile.mkdtemp())
for operator in ("column", "row", "to_heads", "to_rows"):
    for shape in (((8, 2), 64, 32), ((3, 5), 37, 29)):
        task = Task(4, operator, "fused", torch.bfloat16, shape, node_ranks=2)
        for rank in task.ranks:
            compile_tests.call(task, rank, claims)
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


def test_kernels_across_nodes_are_compiled_ahead_once_each() -> None:
    asked = ast.literal_eval(_run("-c", AHEAD).splitlines()[-1])
    kernels = {name for name, _, _ in asked}
    products = ("all_gather_gemm_kernel", "gemm_reduce_scatter_kernel", "all_to_all_gemm_kernel")
    assert {family + name for family in ("", "hopper_") for name in products} < kernels
    assert {(world, local) for name, world, local in asked if "gemm" in name} == {(4, 2)}
    assert [name for name, _, _ in asked].count("next_epoch_kernel") == 1, "claimed by the call that came first"
