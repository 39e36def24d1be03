"""The package as pip installs it: kernels/ and integrations/ inside overlap_train; importing it touches no device.

The wheel and the editable install are made in environments of their own, which see torch and the build tools of this
one through a .pth file: nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SUBPACKAGES = ("kernels", "integrations.megatron", "ops", "nodes", "symmetric", "tools.doctor", "tools.slurm")
STRANGERS = {"kernels", "integrations", "recipes", "tests", "launch", "benchmarks", "docs"}
PACKAGE_FOLDERS = {
    "overlap_train": "overlap_train",
    "kernels": "overlap_train.kernels",
    "integrations": "overlap_train.integrations",
}

LOCATE = """
import importlib.util, json, sys
names = ["overlap_train", *("overlap_train." + name for name in sys.argv[1:])]
print(json.dumps({name: importlib.util.find_spec(name).origin for name in names}))
"""

IMPORT_ALONE = """
import json, sys
import torch
torchs = set(sys.modules)
import overlap_train
heavy = sorted({name.partition(".")[0] for name in {*sys.modules} - torchs} & {"triton", "megatron", "nvshmem", "cuda"})
print(json.dumps({"heavy": heavy, "cuda": torch.cuda.is_initialized()}))
"""


class Environment:
    """An empty virtual environment that sees this one's packages, but not this one's editable overlap_train."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"
        self.site_packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        # Behind the environment's own packages; .pth files inside a folder added this way are not read.
        (self.site_packages / "outer.pth").write_text("\n".join(p for p in sys.path if p.endswith("-packages")))

    def pip(self, *arguments: str) -> None:
        self._run("-m", "pip", *arguments, "--no-deps", "--no-index", "--ignore-installed", "--no-warn-script-location")

    def evaluate(self, code: str, *arguments: str, folder: Path) -> dict:
        """What the code prints as JSON when it runs in this folder, with no module of the repository in reach."""
        return json.loads(self._run("-c", code, *arguments, folder=folder).splitlines()[-1])

    def evaluate_in(self, checkout: Path, code: str, *arguments: str) -> dict:
        """The same with the modules of a checkout in reach, as `python -m` in its root has them."""
        without = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        command = [str(self.python), "-c", code, *arguments]
        return json.loads(subprocess.check_output(command, cwd=checkout, env=without, text=True).splitlines()[-1])

    def _run(self, *arguments: str, folder: Path = ROOT) -> str:
        command = [str(self.python), "-I", *arguments]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
        assert result.returncode == 0, f"{command}:\n{result.stdout[-2000:]}{result.stderr[-4000:]}"
        return result.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the build reads, so that neither build/ nor an egg-info folder appears in the repository."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    for name in PACKAGE_FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    how = ("-w", str(folder), "--no-deps", "--no-build-isolation")
    command = [sys.executable, "-m", "pip", "wheel", str(source), *how]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("wheel_environment"))
    environment.pip("install", str(wheel))
    return environment


def test_the_wheel_holds_every_module_and_no_other_top_level(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        "/".join([*package.split("."), *path.relative_to(ROOT / folder).parts])
        for folder, package in PACKAGE_FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name.partition("/")[0] for name in names} == {"overlap_train", "overlap_train-0.1.0.dist-info"}
    templates = {f"overlap_train/tools/slurm/{name}" for name in ("train.sbatch", "compare.sbatch", "job.sh")}
    assert {"overlap_train/py.typed"} | templates <= names


def test_the_wheel_imports_from_an_empty_environment(installed: Environment, tmp_path: Path) -> None:
    found = installed.evaluate(LOCATE, *SUBPACKAGES, folder=tmp_path)
    package = installed.site_packages / "overlap_train"
    for name, file in found.items():
        assert Path(file) == package.joinpath(*name.split(".")[1:], "__init__.py")
    assert not STRANGERS & {path.name for path in installed.site_packages.iterdir()}


def test_a_checkout_is_whole_whatever_is_installed(installed: Environment, source: Path) -> None:
    found = installed.evaluate_in(source, LOCATE, *SUBPACKAGES)
    assert all(Path(file).is_relative_to(source) for file in found.values())


def test_importing_the_package_loads_no_kernel_library_and_no_device(installed: Environment, tmp_path: Path) -> None:
    assert installed.evaluate(IMPORT_ALONE, folder=tmp_path) == {"heavy": [], "cuda": False}


def test_the_editable_install_maps_the_folders(source: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment")
    environment.pip("install", "--no-build-isolation", "--editable", str(source))
    found = environment.evaluate(LOCATE, *SUBPACKAGES, folder=tmp_path)
    for name, file in found.items():
        folder, *rest = name.removeprefix("overlap_train.").split(".")
        folder = folder if folder in PACKAGE_FOLDERS else "overlap_train/" + folder
        assert Path(file) == source.joinpath(folder, *rest, "__init__.py")
    added = source / "kernels" / "added_later.py"
    added.write_text("value = 3\n")
    code = "import json; from overlap_train.kernels.added_later import value; print(json.dumps({'value': value}))"
    assert environment.evaluate(code, folder=tmp_path) == {"value": 3}
    added.unlink()
