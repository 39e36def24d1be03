"""Versions, and whether they fit together.

The ranges are those of the package metadata: what overlap-train, torch, nvshmem4py, Megatron-Core and TransformerEngine say that
they require. There is no second list here. In a checkout that is not installed, pyproject.toml stands in for our metadata.
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
from packaging.version import Version

from .place import Place
from .report import FAIL, Finding

US = "overlap-train"
# What each package is needed for; a package that is missing is judged by it.
PURPOSES = {
    "torch": "everything",
    "triton": "the method fused",
    "megatron-core": "Megatron models",
    "transformer-engine": "Megatron models that use its layers",
    "nvshmem4py-cu13": "the provider nvshmem (without it: torch, on one node)",
    "nvidia-nvshmem-cu13": "the provider nvshmem",
    "nvidia-nccl-cu13": "collectives on GPUs",
    "cuda-bindings": "what the doctor asks the driver",
    "cuda-core": "the provider nvshmem",
}
_ASKING = (US, "torch", "nvshmem4py-cu13", "megatron-core", "transformer-engine")


@dataclass(frozen=True)
class Demand:
    """`by` requires `package` within `range` (">=2.11"); extra: only for this extra of ours."""

    by: str
    package: str
    range: str
    extra: str = ""


@dataclass(frozen=True)
class Inventory:
    """versions: installed packages; demands: what they require of each other; torch_cuda: CUDA version torch was built for."""

    versions: dict[str, str]
    demands: tuple[Demand, ...]
    torch_cuda: str | None


def read_inventory() -> Inventory:
    """Of this process."""
    versions = {name: version for name in (*PURPOSES, US) if (version := _installed(name)) is not None}
    versions["torch"] = torch.__version__  # that of a source build has no other place
    demands = tuple(demand for name in _ASKING if name in versions or name == US for demand in _demands(name))
    return Inventory(versions, demands, torch.version.cuda)


def check_versions(place: Place, inventory: Inventory) -> list[Finding]:
    """One finding a package, and one for the CUDA version that packages are built for."""
    found = [_judge(place, name, inventory) for name in PURPOSES if inventory.torch_cuda or not _for_gpus(name)]
    return found + _judge_cuda(place, inventory)


def disagreements(findings: Sequence[Finding]) -> list[Finding]:
    """Findings of all ranks -> a FAIL for each rank whose version of something differs from most ranks'."""
    lines: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.name.startswith("version "):
            lines.setdefault(finding.name, []).append(finding)
    odd: list[Finding] = []
    for name, same in lines.items():
        usual = Counter(finding.measured for finding in same).most_common(1)[0][0]
        fix = "install the same packages on every host: the ranks of a group must run the same code"
        expected = f"{usual}, as on the other ranks"
        strangers = [finding for finding in same if finding.measured != usual]
        odd += [replace(f, name=f"{name}: ranks differ", status=FAIL, expected=expected, fix=fix) for f in strangers]
    return odd


def _for_gpus(package: str) -> bool:
    """Not needed by a CPU build of torch."""
    return package.removeprefix("nvidia-").startswith(("nvshmem", "nccl", "cuda"))


def _judge(place: Place, package: str, inventory: Inventory) -> Finding:
    name, version, mine = f"version {package}", inventory.versions.get(package), _ours(package, inventory)
    if version is None:
        return _missing(place, name, package, mine)
    broken = [d for d in inventory.demands if d.package == package and not _fits(version, d.range)]
    ours = [d for d in broken if d.by == US]
    if ours:
        return place.fail(name, version, ours[0].range, f'pip install "{package}{ours[0].range}"')
    if broken:
        asked = ", ".join(f"{d.range} (asked for by {d.by} {inventory.versions.get(d.by, '')})" for d in broken)
        return place.warn(name, version, asked, f'pip install "{package}{broken[0].range}"')
    return place.ok(name, version, mine.range if mine else "")


def _missing(place: Place, name: str, package: str, mine: Demand | None) -> Finding:
    purpose = f"not installed; needed for {PURPOSES[package]}"
    if mine is not None and not mine.extra:
        return place.fail(name, purpose, mine.range, f'pip install "{package}{mine.range}"')
    if mine is None:
        return place.ok(name, purpose)
    extra = f"{US}[{mine.extra}]" if mine.extra != "dev" else f"{package}{mine.range}"
    return place.warn(name, purpose, mine.range, f'pip install "{extra}"')


def _judge_cuda(place: Place, inventory: Inventory) -> list[Finding]:
    if inventory.torch_cuda is None or "nvshmem4py-cu13" not in inventory.versions:
        return []
    built = f"torch for CUDA {inventory.torch_cuda}, nvshmem4py for CUDA 13"
    if inventory.torch_cuda.partition(".")[0] == "13":
        return [place.ok("version cuda", built)]
    fix = "install torch for CUDA 13, or use --overlap-train-provider torch"
    return [place.fail("version cuda", built, "the same major version", fix)]


def check_driver(place: Place, driver: tuple[int, int] | None, torch_cuda: str | None) -> list[Finding]:
    """driver: newest CUDA version that the driver supports; None: there is no driver."""
    if torch_cuda is None or driver is None:
        return []
    built = tuple(int(part) for part in torch_cuda.split(".")[:2])
    measured = f"supports CUDA {driver[0]}.{driver[1]}"
    if driver[0] < built[0]:
        fix = f"install a driver for CUDA {torch_cuda}, or a torch built for CUDA {driver[0]}"
        return [place.fail("version driver", measured, f"CUDA {torch_cuda} or newer, as torch is built for", fix)]
    if driver < built:
        fix = "works by minor-version compatibility; update the driver if kernels do not load"
        return [place.warn("version driver", measured, f"CUDA {torch_cuda} or newer", fix)]
    return [place.ok("version driver", measured, f"CUDA {torch_cuda} or newer")]


def check_nccl(place: Place, loaded: tuple[int, ...] | None, packaged: str | None) -> list[Finding]:
    """loaded: the NCCL that torch has loaded; packaged: the wheel's version. They differ where LD_LIBRARY_PATH interferes."""
    if loaded is None or packaged is None:
        return []
    text = ".".join(map(str, loaded))
    if Version(packaged).release[: len(loaded)] == tuple(loaded):
        return [place.ok("nccl loaded", text, packaged)]
    fix = "remove the other NCCL from LD_LIBRARY_PATH and LD_PRELOAD, unless your cluster's plugin needs it"
    return [place.warn("nccl loaded", text, f"{packaged}, the installed wheel", fix)]


def driver_version() -> tuple[int, int] | None:
    """The newest CUDA version that the driver supports."""
    try:
        from cuda.bindings import driver

        status, number = driver.cuDriverGetVersion()
    except Exception:  # without a driver, cuda-bindings raises a class of its own
        return None
    return (number // 1000, number % 1000 // 10) if status == driver.CUresult.CUDA_SUCCESS and number else None


def _ours(package: str, inventory: Inventory) -> Demand | None:
    return next((d for d in inventory.demands if d.by == US and d.package == package), None)


def _fits(version: str, allowed: str) -> bool:
    return Requirement(f"package{allowed}").specifier.contains(Version(version), prereleases=True)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _demands(by: str) -> Iterator[Demand]:
    for text, extra in _requirements(by):
        requirement = Requirement(text)
        extras = (extra,) if extra else ("", "megatron", "nvshmem", "dev") if by == US else ("",)
        holds = [e for e in extras if requirement.marker is None or requirement.marker.evaluate({"extra": e})]
        if requirement.name in PURPOSES and holds:
            yield Demand(by, requirement.name, str(requirement.specifier), holds[0])


def _requirements(by: str) -> list[tuple[str, str]]:
    """(requirement, extra that the text itself does not name)"""
    try:
        return [(text, "") for text in importlib.metadata.requires(by) or []]
    except importlib.metadata.PackageNotFoundError:
        source = Path(__file__).parents[2] / "pyproject.toml"
    if not source.exists():
        return []
    project = tomllib.loads(source.read_text())["project"]
    extras = [(text, extra) for extra, texts in project["optional-dependencies"].items() for text in texts]
    return [(text, "") for text in project["dependencies"]] + extras
