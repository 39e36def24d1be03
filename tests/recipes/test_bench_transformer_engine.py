"""TransformerEngine as a baseline: by a stand-in on two processes, what it may break, and how long it may take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.recipes import bench_te_stand_in
from tests.script_server import ScriptServer

BENCH = ("-m", "overlap_train", "bench")
TINY = ("--layers", "tiny-mlp", "--seq", "16", "--quick", "--methods", "chunked")


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "layers.json").read_text())["rows"]


def change(folder: Path, text: str, other: str) -> None:
    """In the stand-in."""
    file = folder / "transformer_engine" / "pytorch" / "__init__.py"
    assert file.read_text().count(text) == 1
    file.write_text(file.read_text().replace(text, other))


def test_its_linears_run_with_nccl_and_with_userbuffers(script_server: ScriptServer, tmp_path: Path) -> None:
    bench_te_stand_in.install(tmp_path)
    status, said = script_server.run(*BENCH, "layers", *TINY, "--out", str(tmp_path), folder=tmp_path)
    assert status == 0, said
    (row,) = rows_in(tmp_path)
    assert row["te_ms"] > 0 and row["te_userbuffers_ms"] > 0
    assert "te: " not in said and ": te_" not in said, "a note about it"
    assert "userbuffers [16, 32]" in said


def test_userbuffers_that_do_not_start_leave_the_rest(script_server: ScriptServer, tmp_path: Path) -> None:
    """On one rank only: the others must not wait for it."""
    bench_te_stand_in.install(tmp_path)
    change(tmp_path, 'print(f"userbuffers {shape}")', "assert dist.get_rank() == 0, 'no CUDA IPC'")
    status, said = script_server.run(*BENCH, "layers", *TINY, "--out", str(tmp_path), folder=tmp_path)
    assert status == 0, said
    (row,) = rows_in(tmp_path)
    assert row["te_ms"] > 0 and row["te_userbuffers_ms"] is None and row["ms"] > 0
    assert "tiny-mlp s=16: te_userbuffers: AssertionError: no CUDA IPC" in said


@pytest.mark.slow
def test_a_wrong_result_is_not_timed(script_server: ScriptServer, tmp_path: Path) -> None:
    bench_te_stand_in.install(tmp_path)
    change(
        tmp_path,
        "return F.linear(whole, self.weight) if is_column",
        "return 2 * F.linear(whole, self.weight) if is_column",
    )
    status, said = script_server.run(*BENCH, "layers", *TINY, "--out", str(tmp_path), folder=tmp_path)
    assert status == 0, said
    (row,) = rows_in(tmp_path)
    assert row["te_ms"] is None and row["te_userbuffers_ms"] is None and row["ms"] > 0
    assert "te_ring: WrongResult" in said


def test_one_that_hangs_ends_the_run(script_server: ScriptServer, tmp_path: Path) -> None:
    bench_te_stand_in.install(tmp_path)
    change(tmp_path, 'print(f"userbuffers {shape}")', "__import__('time').sleep(100)")
    program = (
        "import runpy, sys; from overlap_train.tools.bench import transformer_engine as te; "
        "te.LIMIT_S = 2.0; sys.argv[0] = 'overlap_train'; "
        "runpy.run_module('overlap_train', run_name='__main__')"
    )
    (tmp_path / "program.py").write_text(program)
    run = (str(tmp_path / "program.py"), "bench", "layers", *TINY, "--out", str(tmp_path))
    status, said = script_server.run(*run, folder=tmp_path)
    assert status == 1
    assert "Timeout" in said and "transformer_engine.py" in said, "where it hung"
