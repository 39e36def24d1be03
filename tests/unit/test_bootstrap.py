"""launch/bootstrap.sh, as far as it needs no package index."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("launch", "constraints"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def set_up(checkout: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "launch/bootstrap.sh", "main"], capture_output=True, text=True, timeout=100,
        env={**os.environ, "PIP_NO_INDEX": "1"},
    )  # fmt: skip


def test_a_users_own_environment_is_not_deleted(checkout: Path) -> None:
    own = checkout / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    ended = set_up(checkout)
    assert ended.returncode == 1 and "[set-up] error: .venv was not made by this script" in ended.stderr
    assert own.read_text() == "mine"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the torch of this machine is kept, so nothing fails")
def test_a_set_up_that_has_failed_starts_again(checkout: Path) -> None:
    for again in (False, True):
        ended = set_up(checkout)
        assert ended.returncode == 1 and "could not install torch" in ended.stderr
        assert (".venv is unfinished or of another kind: starting again" in ended.stdout) is again
