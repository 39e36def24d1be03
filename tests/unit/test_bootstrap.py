"""launch/bootstrap.sh, as far as it needs no package index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SHIM = """#!/bin/bash
for found in $(type -aP python3.12); do [ "$found" = "$0" ] || exec "$found" "$@"; done
exit 127
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy in a folder whose name is no regular expression for itself."""
    folder = tmp_path / "c++ [1"
    for name in ("launch", "constraints"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (tmp_path / "link").symlink_to(folder)
    return folder


def set_up(checkout: Path, which: str = "main", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "launch/bootstrap.sh", which], capture_output=True, text=True, timeout=100,
        env={**os.environ, "PIP_NO_INDEX": "1", **environment},
    )  # fmt: skip


def has_python(version: str) -> bool:
    found = subprocess.run(
        ["/bin/bash", "-c", f". launch/python.sh; find_python {version}"], cwd=ROOT, capture_output=True
    )
    return found.returncode == 0


@pytest.mark.parametrize("activated", ["{checkout}/.venv/bin", ".venv/bin", "{checkout}/../link/.venv/bin"])
def test_an_environment_is_not_made_from_itself(checkout: Path, activated: str) -> None:
    """Neither by its own python, nor by a shim of pyenv, which runs what it finds on PATH."""
    own, shim = checkout / ".venv" / "bin" / "python3.12", checkout / "shims" / "python3.12"
    for path in (own, shim):
        path.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    shim.write_text(SHIM)
    shim.chmod(0o755)
    path = f"{activated.format(checkout=checkout)}:{shim.parent}"
    found = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", 'cd "$0"; . launch/python.sh; echo "$PATH"; find_python 3.12 || true', checkout],
        capture_output=True, text=True, env={"PATH": path}, check=True,
    )  # fmt: skip
    path_left, *python = found.stdout.splitlines()
    assert path_left == str(shim.parent)
    assert str(checkout) not in "".join(python) and not "".join(python).startswith(".venv")


def test_a_users_own_environment_is_not_deleted(checkout: Path) -> None:
    own = checkout / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    ended = set_up(checkout)
    assert ended.returncode == 1 and "[set-up] error: .venv was not made by this script" in ended.stderr
    assert own.read_text() == "mine"


def with_free_disk(checkout: Path, free_gb: int) -> dict[str, str]:
    """An environment in which so much of the disk is free."""
    df = checkout / "bin" / "df"
    df.parent.mkdir()
    df.write_text(f"#!/bin/sh\necho header\necho disk 0 0 {free_gb * 1024 * 1024}\n")
    df.chmod(0o755)
    return {"PATH": f"{df.parent}:{os.environ['PATH']}"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the torch of this machine is kept, so nothing fails")
def test_a_set_up_that_has_failed_starts_again_and_an_update_does_not(checkout: Path) -> None:
    environment, kind = with_free_disk(checkout, 8), checkout / ".venv" / "kind"
    kind.parent.mkdir()
    for left in ("kind", "half-copied"):
        (kind.parent / left).write_text("of a set-up that was interrupted")
    ended = set_up(checkout, **environment)
    assert ended.returncode == 1 and "could not install torch" in ended.stderr
    assert ".venv is unfinished or of another kind: starting again" in ended.stdout
    assert {path.name for path in kind.parent.iterdir()} == {"kind", "install.log"}
    assert kind.read_text().split()[0] == ("py312" if has_python("3.12") else "py311")
    # An update that fails, here for lack of pip, leaves what works.
    (kind.parent / "complete").write_text("with other versions")
    (kind.parent / "lib").mkdir()
    assert "updating .venv" in set_up(checkout, **environment).stdout and (kind.parent / "lib").exists()
