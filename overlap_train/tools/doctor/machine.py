"""What one rank finds on its own machine: packages and their versions, variables, and its GPU.

The ranges of versions are those of the packages' metadata, so there is no second list. In a checkout that is not installed,
pyproject.toml stands in for ours.
"""

from __future__ import annotations

import importlib.metadata
import os
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ...select.table import installed
from .report import FAIL, WARN, Finding, fail, ok, warn

US = "overlap-train"
# What each package is needed for, and what installs it where it is optional.
PURPOSES = {
    "torch": ("everything", ""),
    "triton": ("the methods fused and direct", "triton"),
    "megatron-core": ("Megatron models", "megatron-core psutil"),
    "transformer-engine": ("Megatron models that use its layers", ""),
    "nvshmem4py-cu13": ("the provider nvshmem (without it: torch, on one node)", "nvshmem4py-cu13 cuda-core"),
    "nvidia-nvshmem-cu13": ("the provider nvshmem", "nvshmem4py-cu13 cuda-core"),
    "nvidia-nccl-cu13": ("collectives on GPUs", ""),
    "cuda-core": ("the provider nvshmem", "nvshmem4py-cu13 cuda-core"),
}
_FOR_GPUS = ("nvshmem", "nvidia", "cuda")  # a machine without GPU needs none of them

# The doctor never uses NVLink multicast, and sets these before CUDA starts: where multicast is broken, merely setting it up can
# take the host's GPUs down. No operator of ours needs it.
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
_HANGS = "unset: the host would wait for a fused kernel before it enqueues the pushes that the peers' kernels wait for"
# Variables that must not be set on GPUs: status, and why.
HURTS = {
    "CUDA_LAUNCH_BLOCKING": (FAIL, _HANGS),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (FAIL, _HANGS),
    "TRITON_INTERPRET": (FAIL, "unset on GPUs: kernels would be interpreted on the CPU"),
    "NVSHMEM_DISABLE_P2P": (FAIL, "unset: the provider nvshmem pushes over NVLink"),
    "NVSHMEM_DISABLE_CUDA_VMM": (WARN, "unset: without it the heap cannot grow beyond NVSHMEM_SYMMETRIC_SIZE"),
    "NCCL_P2P_DISABLE": (WARN, "unset: NCCL would not use NVLink"),
}


def check_versions(on_gpu: bool) -> list[Finding]:
    """One finding for each package that something here requires."""
    asked = {by: _requirements(by) for by in (US, "torch", "nvshmem4py-cu13", "megatron-core", "transformer-engine")}
    packages = [name for name in PURPOSES if on_gpu or not name.startswith(_FOR_GPUS)]
    found = [_judge(name, {by: needs[name] for by, needs in asked.items() if name in needs}) for name in packages]
    if on_gpu:
        found.append(ok("version nccl loaded", ".".join(map(str, torch.cuda.nccl.version()))))
    return found


def _judge(package: str, ranges: dict[str, SpecifierSet]) -> Finding:
    """ranges: of versions, by the package that asks for them."""
    name, (purpose, optional) = f"version {package}", PURPOSES[package]
    version = (
        torch.__version__ if package == "torch" else installed(package)
    )  # that of a source build has no other place
    ours = ranges.get(US, SpecifierSet())
    pip = f'pip install "{package}{ours}"'
    if version is None:
        missing = f"not installed; needed for {purpose}"
        if US not in ranges:
            return ok(name, missing)
        return (
            warn(name, missing, str(ours), f"pip install {optional}")
            if optional
            else fail(name, missing, str(ours), pip)
        )
    if not ours.contains(version, prereleases=True):
        lowest = SpecifierSet(",".join(str(part) for part in ours if not part.operator.startswith("<")))
        if lowest.contains(version, prereleases=True):
            return warn(name, f"{version}: newer than tested", str(ours), f"if something fails, {pip}")
        return fail(name, version, str(ours), pip)
    for by, allowed in ranges.items():
        if not allowed.contains(version, prereleases=True):
            return warn(name, version, f"{allowed}, asked for by {by}", f'pip install "{package}{allowed}"')
    return ok(name, version, str(ours))


def _requirements(by: str) -> dict[str, SpecifierSet]:
    """The ranges that a package asks for, its extras included; of the packages in PURPOSES."""
    source = Path(__file__).parents[3] / "pyproject.toml"
    if installed(by) is not None:
        lines = importlib.metadata.requires(by) or []
    elif by == US and source.exists():
        project = tomllib.loads(source.read_text())["project"]
        lines = list(chain(project["dependencies"], *project["optional-dependencies"].values()))
    else:
        lines = []
    extras = ("", "megatron", "nvshmem", "dev") if by == US else ("",)
    needs = [needed for needed in map(Requirement, lines) if needed.name in PURPOSES]
    fits = [n for n in needs if n.marker is None or any(n.marker.evaluate({"extra": extra}) for extra in extras)]
    return {needed.name: needed.specifier for needed in fits}


def disagreements(findings: Sequence[Finding]) -> list[Finding]:
    """Findings of all ranks -> a FAIL for each rank where something has another version, or device, than on most ranks."""
    odd: list[Finding] = []
    fix = "install the same packages on every host, and give all ranks a GPU or none: a group runs the same code"
    for name in dict.fromkeys(finding.name for finding in findings):
        same = [finding for finding in findings if finding.name == name]
        usual = Counter(finding.measured for finding in same).most_common(1)[0][0]
        expected = f"{usual}, as on the other ranks"
        strangers = [finding for finding in same if finding.measured != usual]
        odd += [replace(f, name=f"{name}: ranks differ", status=FAIL, expected=expected, fix=fix) for f in strangers]
    return odd


def check_environment(on_gpu: bool, variables: Mapping[str, str]) -> list[Finding]:
    """A finding for each variable that hurts; on CPU ranks those of GPUs do not matter."""
    if not on_gpu:
        return [ok("environment", "CPU ranks: variables of CUDA, NCCL and NVSHMEM do not matter")]
    found = [
        Finding(f"environment {name}", status, variables[name], why, f"unset {name}")
        for name, (status, why) in HURTS.items()
        if variables.get(name, "").lower() not in ("", "0", "false", "no", "off")
    ]
    connections = variables.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if connections != "1":
        expected = "1: Megatron-Core refuses sequence parallelism without it before Blackwell"
        fix = "export CUDA_DEVICE_MAX_CONNECTIONS=1 (overlap_train works with and without)"
        found.append(warn("environment CUDA_DEVICE_MAX_CONNECTIONS", connections or "not set", expected, fix))
    return found or [ok("environment", "nothing set that hurts")]


def check_gpu(index: int, used: int) -> list[Finding]:
    """State of GPU `index` of this node, and its access to the others of the `used` GPUs that ranks of this node have."""
    count = torch.cuda.device_count()
    if count == 0:
        return [_no_gpu()]
    if index >= count:
        fix = (
            "start as many ranks as GPUs, and let each rank see all GPUs of its node (no CUDA_VISIBLE_DEVICES for each rank, "
            "Slurm: --gpu-bind=none): a peer that is not visible cannot be mapped"
        )
        measured = f"local rank {index}, but {count} visible GPUs"
        return [fail("gpu visible", measured, f"more than {index} visible GPUs", fix)]
    torch.cuda.set_device(index)
    properties, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
    gib = [size / (1 << 30) for size in (total - free, total)]
    version = f"sm_{properties.major}{properties.minor}"
    measured = f"GPU {index}: {properties.name}, {version}, {gib[0]:.1f} of {gib[1]:.0f} GiB in use"
    state = ok("gpu", measured)
    if properties.major < 8:
        state = fail("gpu", measured, "sm_80 or newer for bf16", "use a newer GPU, or fp16 with the method chunked")
    elif gib[0] > 0.1 * gib[1]:
        fix = "end the other processes on this GPU (nvidia-smi): they take memory and time"
        state = warn("gpu", measured, "at most a tenth in use before training", fix)
    return [state, *_peer_access(index, [other for other in range(min(count, used)) if other != index])]


def _no_gpu() -> Finding:
    unchecked = "not checked: NVLink, peer access, providers torch and nvshmem, copy engine, fused kernels on the GPU"
    if not os.path.exists("/proc/driver/nvidia/version"):
        return warn("gpu visible", f"none; {unchecked}", "a GPU", "run the doctor where training will run")
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    seen = f"an NVIDIA driver, but torch ({built}) sees no GPU; {unchecked}"
    fix = "install a torch for the driver's CUDA version; look at CUDA_VISIBLE_DEVICES and the container's GPU options"
    return fail("gpu visible", seen, "a GPU for torch", fix)


def _peer_access(index: int, others: Sequence[int]) -> list[Finding]:
    if not others:
        return []
    cut_off = [other for other in others if not torch.cuda.can_device_access_peer(index, other)]
    if cut_off:
        fix = (
            "nvidia-smi topo -p2p r; look for MIG, IOMMU or ACS, a container without all GPUs, a stopped fabric manager"
        )
        measured = f"GPU {index}: none to GPU {', '.join(map(str, cut_off))}"
        return [fail("peer access", measured, "all GPUs of the group", fix)]
    return [ok("peer access", f"GPU {index}: to all {len(others)} others")]
