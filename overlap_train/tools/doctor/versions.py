"""Versions, and whether they fit together.

The ranges are those of the package metadata: what overlap-train, torch, nvshmem4py, Megatron-Core and TransformerEngine require.
There is no second list here. In a checkout that is not installed, pyproject.toml stands in for our metadata.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ...select.table import installed
from .report import FAIL, Finding, fail, ok, warn

US = "overlap-train"
EXTRAS = ("", "megatron", "nvshmem", "dev")
# What each package is needed for, and what installs it where it is optional.
PURPOSES = {
    "torch": ("everything", ""),
    "triton": ("the methods fused and direct", "triton"),
    "megatron-core": ("Megatron models", "megatron-core psutil"),
    "transformer-engine": ("Megatron models that use its layers", ""),
    "nvshmem4py-cu13": ("the provider nvshmem (without it: torch, on one node)", "nvshmem4py-cu13 cuda-core"),
    "nvidia-nvshmem-cu13": ("the provider nvshmem", "nvshmem4py-cu13 cuda-core"),
    "nvidia-nccl-cu13": ("collectives on GPUs", ""),
    "cuda-bindings": ("what the doctor asks the driver", ""),
    "cuda-core": ("the provider nvshmem", "nvshmem4py-cu13 cuda-core"),
}
_ASKING = (US, "torch", "nvshmem4py-cu13", "megatron-core", "transformer-engine")
_FOR_GPUS = ("nvshmem", "nvidia", "cuda")  # a CPU build of torch, or a machine without GPU, needs none of them


@dataclass(frozen=True)
class Demand:
    """`by` requires `package` within `range` (">=2.11")."""

    by: str
    package: str
    range: str


@dataclass(frozen=True)
class Inventory:
    """What is installed. versions: of packages; demands: what they require of each other; torch_cuda: CUDA version torch was
    built for."""

    versions: dict[str, str]
    demands: tuple[Demand, ...]
    torch_cuda: str | None


def read_inventory() -> Inventory:
    """The Inventory of this process."""
    versions = {name: version for name in (*PURPOSES, US) if (version := installed(name)) is not None}
    versions["torch"] = torch.__version__  # that of a source build has no other place
    demands = tuple(demand for name in _ASKING for demand in _demands(name))
    return Inventory(versions, demands, torch.version.cuda)


def check_versions(inventory: Inventory, on_gpu: bool = True) -> list[Finding]:
    """One finding a package, and one for the CUDA version that packages are built for."""
    cuda = inventory.torch_cuda
    found = [_judge(name, inventory, on_gpu) for name in PURPOSES if cuda or not name.startswith(_FOR_GPUS)]
    if cuda is not None and "nvshmem4py-cu13" in inventory.versions:
        built = f"torch for CUDA {cuda}, nvshmem4py for CUDA 13"
        fix = "install torch for CUDA 13, or use --overlap-train-provider torch"
        fits = cuda.startswith("13.")
        found.append(ok("version cuda", built) if fits else fail("version cuda", built, "the same major version", fix))
    return found


def _judge(package: str, inventory: Inventory, on_gpu: bool) -> Finding:
    name, version = f"version {package}", inventory.versions.get(package)
    asked = {d.by: d.range for d in inventory.demands if d.package == package}
    ours = asked.pop(US, "")
    if version is None:
        return _judge_missing(package, ours, on_gpu)
    if not _fits(version, ours):
        pip = _pip(package, ours)
        if _fits(version, _without_upper_bound(ours)):
            return warn(name, f"{version}: newer than tested", ours, f"if something fails, {pip}")
        return fail(name, version, ours, pip)
    broken = {by: allowed for by, allowed in asked.items() if not _fits(version, allowed)}
    if broken:
        told = ", ".join(f"{r} (asked for by {by} {inventory.versions.get(by, '')})" for by, r in broken.items())
        return warn(name, version, told, _pip(package, next(iter(broken.values()))))
    return ok(name, version, ours)


def _judge_missing(package: str, ours: str, on_gpu: bool) -> Finding:
    """The finding about a package that is not installed. ours: the range that overlap-train requires; empty: none."""
    name, (purpose, optional) = f"version {package}", PURPOSES[package]
    missing = f"not installed; needed for {purpose}"
    if not ours:
        return ok(name, missing)
    if not on_gpu and package.startswith(_FOR_GPUS):
        return ok(name, f"not installed; only GPUs use it, for {purpose}", ours)
    if optional:
        return warn(name, missing, ours, f"pip install {optional}")
    return fail(name, missing, ours, _pip(package, ours))


def _pip(package: str, allowed: str) -> str:
    return f'pip install "{package}{allowed}"'


def disagreements(findings: Sequence[Finding]) -> list[Finding]:
    """Findings of all ranks -> a FAIL for each rank whose version of something differs from most ranks'."""
    odd: list[Finding] = []
    for name in dict.fromkeys(finding.name for finding in findings if finding.name.startswith("version ")):
        same = [finding for finding in findings if finding.name == name]
        usual = Counter(finding.measured for finding in same).most_common(1)[0][0]
        fix = "install the same packages on every host: the ranks of a group must run the same code"
        expected = f"{usual}, as on the other ranks"
        strangers = [finding for finding in same if finding.measured != usual]
        odd += [replace(f, name=f"{name}: ranks differ", status=FAIL, expected=expected, fix=fix) for f in strangers]
    return odd


def check_driver(driver: tuple[int, int] | None, torch_cuda: str | None) -> list[Finding]:
    """The finding about the driver's version, if any. driver: newest CUDA version that it supports; None: there is no driver."""
    if torch_cuda is None or driver is None:
        return []
    name, measured, expected = "version driver", f"supports CUDA {driver[0]}.{driver[1]}", f"CUDA {torch_cuda} or newer"
    built = tuple(int(part) for part in torch_cuda.split(".")[:2])
    if driver[0] < built[0]:
        fix = f"install a driver for CUDA {torch_cuda}, or a torch built for CUDA {driver[0]}"
        return [fail(name, measured, f"{expected}, as torch is built for", fix)]
    if driver < built:
        fix = "works by minor-version compatibility; update the driver if kernels do not load"
        return [warn(name, measured, expected, fix)]
    return [ok(name, measured, expected)]


def check_nccl(loaded: tuple[int, ...] | None, packaged: str | None) -> list[Finding]:
    """The finding about NCCL's version, if any. loaded: the NCCL that torch has loaded; packaged: the wheel's version. They
    differ where LD_LIBRARY_PATH interferes."""
    if loaded is None or packaged is None:
        return []
    text = ".".join(map(str, loaded))
    if Version(packaged).release[: len(loaded)] == tuple(loaded):
        return [ok("nccl loaded", text, packaged)]
    fix = "remove the other NCCL from LD_LIBRARY_PATH and LD_PRELOAD, unless your cluster's plugin needs it"
    return [warn("nccl loaded", text, f"{packaged}, the installed wheel", fix)]


def driver_version() -> tuple[int, int] | None:
    """The newest CUDA version that the driver supports."""
    try:
        from cuda.bindings import driver

        status, number = driver.cuDriverGetVersion()
    except Exception:  # without a driver, cuda-bindings raises a class of its own
        return None
    return (number // 1000, number % 1000 // 10) if status == driver.CUresult.CUDA_SUCCESS and number else None


def _fits(version: str, allowed: str) -> bool:
    return SpecifierSet(allowed).contains(Version(version), prereleases=True)


def _without_upper_bound(allowed: str) -> str:
    return ",".join(str(part) for part in SpecifierSet(allowed) if not part.operator.startswith("<"))


def _demands(by: str) -> Iterator[Demand]:
    for requirement in map(Requirement, _requirements(by)):
        marker, extras = requirement.marker, EXTRAS if by == US else ("",)
        if requirement.name in PURPOSES and (marker is None or any(marker.evaluate({"extra": e}) for e in extras)):
            yield Demand(by, requirement.name, str(requirement.specifier))


def _requirements(by: str) -> list[str]:
    if installed(by) is not None:
        return importlib.metadata.requires(by) or []
    source = Path(__file__).parents[3] / "pyproject.toml"
    if by != US or not source.exists():
        return []
    project = tomllib.loads(source.read_text())["project"]
    return [*project["dependencies"], *(text for texts in project["optional-dependencies"].values() for text in texts)]
