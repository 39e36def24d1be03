"""`overlap-train bench` on CPU processes: what it writes, what it refuses, what it draws."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from overlap_train import cli
from tests.script_server import ScriptServer

BENCH = ("-m", "overlap_train", "bench")
TINY = {  # by command
    "operators": ("--shapes", "tiny", "--rows", "16", "--quick"),
    "layers": ("--layers", "tiny-mlp", "--seq", "16", "--quick"),
    "ulysses": ("--models", "tiny", "--seq", "16", "--quick"),
}
RECORDS = Path(__file__).parents[2] / "benchmarks"
LINEARS, EXCHANGES, PASSES = ("ag_gemm", "gemm_rs"), ("gemm_a2a", "a2a_gemm"), ("fprop", "dgrad")
METHODS = ("chunked", "collective")
OPERATOR_KEYS = {
    "op", "pass", "world", "m", "n", "k", "dtype", "method", "ms", "host_us", "sequence_ms", "async_tp_ms", "gemm_ms",
    "comm_ms", "bound",
}  # fmt: skip
LAYER_KEYS = {
    "layer", "world", "seq", "method", "ms", "megatron_ms", "async_tp_ms", "te_ms", "te_userbuffers_ms",
    "gemms_ms", "host_us",
}  # fmt: skip


def rows_in(folder: Path, name: str = "operators") -> list[dict[str, Any]]:
    """The rows of a file, whose head says where they were measured."""
    record = json.loads((folder / f"{name}.json").read_text())
    assert set(record) == {"hardware", "versions", "date", "rows"}
    assert (folder / f"{name}.md").exists()
    return record["rows"]


Bench = Callable[..., str]


@pytest.fixture
def bench(script_server: ScriptServer, tmp_path: Path) -> Bench:
    """Runs a command that writes into tmp_path, and returns what it says."""

    def run(*words: str) -> str:
        status, said = script_server.run(*BENCH, *words, "--out", str(tmp_path), folder=tmp_path)
        assert status == 0, said
        return said

    return run


def measured(rows: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {(row["op"], row["pass"], row["method"]) for row in rows}


def drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    pytest.importorskip("matplotlib")
    assert cli.main(["bench", "plot", str(folder)]) == 0
    names = [Path(line).name for line in capsys.readouterr().out.splitlines()]
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in names)
    return names


def test_operators(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said, rows = bench("operators", *TINY["operators"]), rows_in(tmp_path)
    assert measured(rows) == set(product(LINEARS, PASSES, METHODS))
    for row in rows:
        assert set(row) == OPERATOR_KEYS and row["world"] == 2 and row["ms"] > 0
        assert row["bound"] == row["sequence_ms"] / max(row["gemm_ms"], row["comm_ms"])
    assert "async-TP needs CUDA" in said and "async-TP needs CUDA" in (tmp_path / "operators.md").read_text()
    assert drawn(tmp_path, capsys) == ["speedup.png"]


def test_layers(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = bench("layers", *TINY["layers"], "--methods", "chunked")
    (row,) = rows_in(tmp_path, "layers")
    assert set(row) == LAYER_KEYS
    assert (row["layer"], row["method"], row["seq"], row["async_tp_ms"]) == ("tiny-mlp", "chunked", 16, None)
    assert row["gemms_ms"] > 0
    assert said.count("te: RuntimeError: transformer_engine is not installed") == 1
    assert drawn(tmp_path, capsys) == ["layers.png"]
    pytest.importorskip("megatron.core")
    assert row["megatron_ms"] > 0


def test_ulysses(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench("ulysses", *TINY["ulysses"])
    assert measured(rows_in(tmp_path)) == set(product(EXCHANGES, PASSES, METHODS))
    assert drawn(tmp_path, capsys) == ["speedup.png"]


def test_operators_in_fp8(bench: Bench, tmp_path: Path) -> None:
    """Of scales of blocks the tiny shapes are too small, which is no failure."""
    arguments = ("operators", "--shapes", "tiny", "--rows", "32", "--quick", "--methods", "chunked", "--fp8")
    said = bench(*arguments, "blockwise")
    assert said.count("fp8 with 32 rows of all ranks: not a multiple of 2 x 128") == 4, said
    said, rows = bench(*arguments, "tensorwise"), rows_in(tmp_path)
    assert [set(row) == OPERATOR_KEYS | {"fp8"} and row["fp8"] == "tensorwise" for row in rows] == [True] * 4
    parts = [row["sequence_ms"] / row["ms"] / row["bound"] for row in rows]
    line = f"of the bound, mean (least): chunked {sum(parts) / 4:.3f} ({min(parts):.3f})"
    assert line in said and f"- {line}" in (tmp_path / "operators.md").read_text()


def test_operators_that_all_reduce(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any number of rows; the passes that all-reduce only."""
    bench("operators", "--all-reduce", "--shapes", "tiny", "--rows", "1", "15", "--quick")
    rows = rows_in(tmp_path)
    assert {(row["op"], row["pass"], row["m"], row["method"]) for row in rows} == {
        (op, pass_, m, method)
        for op, pass_ in (("dgrad_ar", "dgrad"), ("gemm_ar", "fprop"))
        for m in (1, 15)
        for method in METHODS
    }
    assert all(set(row) == OPERATOR_KEYS and row["async_tp_ms"] is None for row in rows)
    assert drawn(tmp_path, capsys) == ["speedup.png"]
    assert cli.main(["plan", "--check", str(tmp_path), "--system", "h200"]) == 2, (
        "no estimate of a scatter stands for it"
    )


def test_operators_across_nodes(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench("hierarchical", "--quick", "--node-ranks", "1", "--methods", "chunked")
    rows = rows_in(tmp_path)
    assert Counter((row["op"], row["pass"], row["method"]) for row in rows) == {
        (op, pass_, "chunked"): 2 for op in (*LINEARS, *EXCHANGES) for pass_ in PASSES
    }
    assert all((row["nodes"], row["network_sms"], row["async_tp_ms"]) == (2, 0, None) for row in rows)
    assert drawn(tmp_path, capsys) == ["speedup.png"]


def test_a_wrong_result_is_refused(script_server: ScriptServer, tmp_path: Path) -> None:
    """A method whose products are wrong has no row, and the command fails."""
    program = (
        "import runpy, sys, torch; mm = torch.mm\n"
        "torch.mm = lambda *a, **more: mm(*a, **more).mul_(1.1)\n"
        "sys.argv[0] = 'overlap_train'; runpy.run_module('overlap_train', run_name='__main__')"
    )
    (tmp_path / "program.py").write_text(program)
    run = (str(tmp_path / "program.py"), "bench", "operators", *TINY["operators"], "--methods", "chunked")
    status, said = script_server.run(*run, "--out", str(tmp_path), folder=tmp_path)
    assert status == 1
    assert "FAILED" in said and "chunked: WrongResult" in said and "than rounding explains" in said
    assert rows_in(tmp_path) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("operators --methods fast", "'fast' is not one of"),
        ("operators --shapes llama9", "argument --shapes: 'llama9' is not one of"),
        ("layers --layers llama3-8b-moe", "is not one of"),
        ("operators --fp8 tensorwise --all-reduce", "--fp8 with --all-reduce"),
        ("rows", "invalid choice"),
        ("operators", "torchrun --standalone --nproc-per-node 4 -m overlap_train bench operators"),
        ("plot .", "no operators.json"),
    ],
)
def test_what_cannot_run_is_refused(
    line: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    if line.startswith("plot"):
        pytest.importorskip("matplotlib")
    assert cli.main(["bench", *line.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("hierarchical --methods chunked,direct", "--methods: 'direct'"),
        ("operators --graphs", "--graphs: CUDA graphs need GPUs"),
        ("timeline", "bench timeline records GPUs, and this process sees none"),
        (
            "operators --shapes llama3-405b --rows 262144",
            "the largest shape: each rank receives 16384 MiB, for which 8192 MiB",
        ),
        ("operators --out file/out", "--out file/out: rank 0 cannot write there (NotADirectoryError"),
    ],
)
def test_what_cannot_run_on_these_ranks_is_refused(
    line: str, message: str, script_server: ScriptServer, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    status, said = script_server.run(*BENCH, *line.split(), folder=tmp_path)
    assert status == 2 and message in said, said


@pytest.mark.parametrize(
    ("files", "name"), [("h200x2/timeline.json", "timeline.png"), ("h200x4/te/*.json", "layers.png")]
)
def test_records_are_drawn(files: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in RECORDS.glob(files):
        shutil.copy(file, tmp_path)
    assert drawn(tmp_path, capsys) == [name]


@pytest.mark.parametrize("words", [["bench", "plot"], ["plan", "--check"]], ids=" ".join)
def test_a_file_that_is_cut_off_is_named(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "operators.json").write_text('{"rows": [')
    assert cli.main([*words, str(tmp_path)]) == 2
    assert f"{tmp_path / 'operators.json'}: no JSON as bench writes it" in capsys.readouterr().err
