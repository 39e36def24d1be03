"""The command line, and both benchmarks on two CPU processes with tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from overlap_train.bench import command, output
from overlap_train.bench.shapes import OPS, PASSES

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_defaults() -> None:
    args = command.parser().parse_args(["operators"])
    assert (args.passes, args.ops, args.m, args.methods, args.quick) == (
        ["fprop", "dgrad"],
        ["ag_gemm", "gemm_rs"],
        None,
        None,
        False,
    )


def test_lists_are_separated_by_commas_and_sizes_by_blanks(tmp_path: Path) -> None:
    line = f"operators --shapes llama3-8b,all --methods fused,auto --passes wgrad --m 256 1024 --out {tmp_path}"
    args = command.parser().parse_args(line.split())
    assert args.shapes == ["llama3-8b", "all"]
    assert (args.methods, args.passes, args.m, args.out) == (["fused", "auto"], ["wgrad"], [256, 1024], tmp_path)
    assert command.parser().parse_args(["layers", "--seq", "4096", "8192", "--layers", "llama3-8b-mlp"]).seq == [
        4096,
        8192,
    ]


@pytest.mark.parametrize(
    "line", ["operators --methods fast", "operators --passes forward", "operators --ops ,", "rows"]
)
def test_unknown_words_are_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(line.split())
    assert "not one of" in (text := capsys.readouterr().err) or "invalid choice" in text


def test_without_torchrun_the_message_says_how_to_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert command.main(["operators", "--tiny"]) == 2
    assert "torchrun --nproc-per-node" in capsys.readouterr().err


def _torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*TORCHRUN, "-m", "overlap_train.bench", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )


def test_operators_run_on_two_processes(tmp_path: Path) -> None:
    arguments = ("--tiny", "--quick", "--passes", "fprop,dgrad,wgrad", "--out", str(tmp_path))
    run = _torchrun("operators", *arguments)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads((tmp_path / "operators.json").read_text())["rows"]
    assert {(row["op"], row["pass"], row["method"]) for row in rows} == {
        (op, pass_, method) for op in OPS for pass_ in PASSES for method in ("chunked", "collective")
    }
    for row in rows:
        assert tuple(row) == output.OPERATOR_KEYS
        assert row["world"] == 2 and row["ms"] > 0 and row["sequence_ms"] > 0 and row["gemm_ms"] > 0
    assert "async-TP needs CUDA" in run.stdout and "async-TP needs CUDA" in (tmp_path / "operators.md").read_text()


@pytest.mark.slow
def test_layers_run_on_two_processes(tmp_path: Path) -> None:
    run = _torchrun("layers", "--tiny", "--quick", "--methods", "chunked", "--out", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    (row,) = json.loads((tmp_path / "layers.json").read_text())["rows"]
    assert (row["layer"], row["method"], row["seq"], row["async_tp_ms"]) == ("tiny", "chunked", 16, None)
    pytest.importorskip("megatron.core")
    assert row["megatron_ms"] > 0


def test_a_shape_that_does_not_exist_ends_with_status_2_and_one_line() -> None:
    run = _torchrun("operators", "--shapes", "llama9")
    assert run.returncode != 0
    assert run.stderr.count("overlap_train.bench: --shapes: 'llama9' is not one of") == 1
