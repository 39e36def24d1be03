"""The command `overlap-train`: its subcommands, and one line for what a user can put right."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import overlap_train
from overlap_train import __version__, cli
from overlap_train.flags import run_command

WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None  # what is not installed cannot be imported
from overlap_train.cli import main
sys.exit(main(sys.argv[2:]))
"""


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"overlap-train {__version__}\n"


def test_the_help_names_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in cli.COMMANDS)


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["benhc"]) == 2
    assert capsys.readouterr().err == "overlap-train: error: 'benhc' is not one of doctor, tune, bench, plan, launch\n"


def run_without(package: str, command: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", WITHOUT, package, *command.split()]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env={**os.environ, "RANK": "0"})


@pytest.mark.parametrize(
    ("package", "command"),
    [("torch", "doctor"), ("torch", "bench operators"), ("torch", "tune --seq 8"), ("packaging", "doctor")],
)
def test_a_missing_package_is_one_line(package: str, command: str) -> None:
    run = run_without(package, command)
    assert run.returncode == 2
    assert run.stderr == f"overlap-train {command.split()[0]} needs {package}: pip install {package!r}\n"


def test_launch_needs_no_torch() -> None:
    run = run_without("torch", "launch --help")
    assert run.returncode == 0 and "--time TIME" in run.stdout


def test_only_rank_0_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["benhc"]) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "words", [[], ["doctor"], ["tune"], ["bench"], ["bench", "operators"], ["bench", "plot"], ["plan"], ["launch"]]
)
def test_only_rank_0_prints_the_help(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with contextlib.suppress(SystemExit):
            cli.main([*words, "--help"])
        assert ("usage: " in capsys.readouterr().out) == (rank == "0")


def test_a_slow_rank_0_still_says_it(tmp_path: Path) -> None:
    """torchrun ends all ranks when the first one has ended."""
    script = tmp_path / "slow.py"
    script.write_text(
        "import os, sys, time\nfrom overlap_train import cli\n"
        "time.sleep(1 if os.environ['RANK'] == '0' else 0)\nsys.exit(cli.main(['benhc']))\n"
    )
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    run = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert run.stderr.count("overlap-train: error: 'benhc' is not one of doctor") == 1


def test_a_bug_keeps_its_traceback() -> None:
    def work() -> int:
        raise ModuleNotFoundError("No module named 'overlap_train.nowhere'", name="overlap_train.nowhere")

    with pytest.raises(ModuleNotFoundError):
        run_command("overlap-train", work)


def test_the_package_lists_its_public_names() -> None:
    assert set(overlap_train.__all__) <= set(dir(overlap_train))
