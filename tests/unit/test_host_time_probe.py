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
