"""The probe of host time runs without a GPU, on its stand-in: every operator, pass and method has its row."""

from __future__ import annotations

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


def test_it_prints_a_row_for_each_operator_pass_and_method() -> None:
    probe = [sys.executable, str(ROOT / "benchmarks/probes/host_time.py"), "--rounds", "1", "--calls", "2"]
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    settings.pop("TRITON_INTERPRET", None)
    told = subprocess.run(probe, env=settings, capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 0, told.stderr
    rows = [tuple(line.split()[:3]) for line in told.stdout.splitlines()[1:]]
    assert rows == sorted(ROWS)
    assert "host time" not in told.stderr, "each kernel is packed: what the probe measures is the packed launch"


TOLD = """
import sys
sys.path.insert(0, "benchmarks/probes")
import stand_in_gpu, torch, torch.distributed as dist
from overlap_train import OverlapConfig, all_gather_linear, linear_reduce_scatter

told, verify = {}, stand_in_gpu.Unchecked.verify

def noted(self, kernel, grid, arguments, constants):
    told[kernel.fn.__name__] = arguments | constants
    return verify(self, kernel, grid, arguments, constants)

stand_in_gpu.Unchecked.verify = noted
with stand_in_gpu.stand_in():
    for method, dtype in (("direct", torch.bfloat16), ("direct", torch.float32), ("low_latency", torch.bfloat16)):
        said = dict(group=dist.group.WORLD, config=OverlapConfig(method=method))
        x, w = torch.ones(128, 256, dtype=dtype), torch.ones(256, 256, dtype=dtype)
        y = all_gather_linear(x, w, **said)
        linear_reduce_scatter(y, w, **said)
for name, values in told.items():
    print(name, values.get("limit"), values.get("TIMED"), values.get("PIECE"))
"""


def test_kernels_are_told_what_they_are_told_on_a_gpu() -> None:
    """A limit of 64 bits, a clock, large pieces: what is compiled for the stand-in is what a GPU's machine asks its cache for."""
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    settings.pop("TRITON_INTERPRET", None)
    told = subprocess.run(
        [sys.executable, "-c", TOLD], cwd=ROOT, env=settings, capture_output=True, text=True, timeout=120, check=False
    )
    assert told.returncode == 0, told.stderr
    kernels = {line.split()[0]: line.split()[1:] for line in told.stdout.splitlines()}
    gemms = {name for name in kernels if "gemm" in name}
    assert len(gemms) == 4 and len([name for name in kernels if "low_latency" in name]) == 2, sorted(kernels)
    assert {limit for limit, _, _ in kernels.values()} <= {str(600 * 10**9), "None"}
    assert {kernels[name][0] for name in kernels if "gemm" in name or "low_latency" in name} == {str(600 * 10**9)}
    assert {timed for _, timed, _ in kernels.values()} == {"True", "None"}
    assert {piece for _, _, piece in kernels.values()} == {"16384", "None"}
