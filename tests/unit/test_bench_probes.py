"""The probe of host time, on CPU processes."""

from __future__ import annotations

import itertools
from pathlib import Path

from tests.script_server import ScriptServer

PROBE = Path(__file__).parents[2] / "benchmarks" / "probes" / "host_time.py"


def test_host_time_has_a_line_for_each_method(script_server: ScriptServer, tmp_path: Path) -> None:
    sizes = ("--rows", "8", "--features", "16", "--rounds", "1", "--calls", "2")
    status, said = script_server.run(str(PROBE), *sizes, folder=tmp_path)
    assert status == 0, said
    rows = {tuple(line.split()[:2]) for line in said.splitlines()}
    assert rows >= {*itertools.product(("column", "row", "both"), ("chunked", "collective", "F.linear"))}
