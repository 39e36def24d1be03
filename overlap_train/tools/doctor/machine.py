"""What one rank finds on its own machine: packages and their versions, variables, and its GPU."""

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
from .report import FAIL, OK, WARN, Finding

PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine")
FOR_GPUS = ("nvshmem4py-cu13", "nvidia-nvshmem-cu13", "cuda-core", "nvidia-nccl-cu13")

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
    """One finding for each package: its version, against the range of our metadata."""
    ranges = _ranges()
    packages = PACKAGES + FOR_GPUS if on_gpu else PACKAGES
    found = [_judge(name, ranges.get(name, SpecifierSet())) for name in packages]
    if on_gpu:
        found.append(Finding(OK, "version nccl loaded", ".".join(map(str, torch.cuda.nccl.version()))))
    return found


def _judge(package: str, allowed: SpecifierSet) -> Finding:
    name, pip = f"version {package}", f'pip install "{package}{allowed}"'
    # That of a source build of torch has no other place.
    version = torch.__version__ if package == "torch" else installed(package)
    if version is None or allowed.contains(version, prereleases=True):
        status, fix = (OK, "") if version or not allowed else (WARN, f"if you want it, {pip}")
        return Finding(status, name, version or "not installed", str(allowed), fix)
    lowest = SpecifierSet(",".join(str(part) for part in allowed if not part.operator.startswith("<")))
    if lowest.contains(version, prereleases=True):
        return Finding(WARN, name, f"{version}: newer than tested", str(allowed), f"if something fails, {pip}")
    return Finding(FAIL, name, version, str(allowed), pip)


def _ranges() -> dict[str, SpecifierSet]:
    """The ranges of versions that we ask for, extras included. In a checkout that is not installed pyproject.toml says them."""
    if installed("overlap-train") is not None:
        lines = importlib.metadata.requires("overlap-train") or []
    else:
        project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
        lines = list(chain(project["dependencies"], *project["optional-dependencies"].values()))
    return {needed.name: needed.specifier for needed in map(Requirement, lines)}


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
        return [Finding(OK, "environment", "CPU ranks: variables of CUDA, NCCL and NVSHMEM do not matter")]
    found = [
        Finding(status, f"environment {name}", variables[name], why, f"unset {name}")
        for name, (status, why) in HURTS.items()
        if variables.get(name, "").lower() not in ("", "0", "false", "no", "off")
    ]
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if variables.get(name) != "1":
        expected = "1: Megatron-Core refuses sequence parallelism without it before Blackwell"
        fix = f"export {name}=1 (overlap_train works with and without)"
        found.append(Finding(WARN, f"environment {name}", variables.get(name) or "not set", expected, fix))
    return found or [Finding(OK, "environment", "nothing set that hurts")]


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
        return [Finding(FAIL, "gpu visible", measured, f"more than {index} visible GPUs", fix)]
    torch.cuda.set_device(index)
    properties, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
    gib = [size / (1 << 30) for size in (total - free, total)]
    version = f"sm_{properties.major}{properties.minor}"
    measured = f"GPU {index}: {properties.name}, {version}, {gib[0]:.1f} of {gib[1]:.0f} GiB in use"
    state = Finding(OK, "gpu", measured)
    if properties.major < 8:
        fix = "use a newer GPU, or fp16 with the method chunked"
        state = Finding(FAIL, "gpu", measured, "sm_80 or newer for bf16", fix)
    elif gib[0] > 0.1 * gib[1]:
        fix = "end the other processes on this GPU (nvidia-smi): they take memory and time"
        state = Finding(WARN, "gpu", measured, "at most a tenth in use before training", fix)
    others = [other for other in range(min(count, used)) if other != index]
    cut_off = [other for other in others if not torch.cuda.can_device_access_peer(index, other)]
    if cut_off:
        fix = (
            "nvidia-smi topo -p2p r; look for MIG, IOMMU or ACS, a container without all GPUs, a stopped fabric manager"
        )
        none = f"GPU {index}: none to GPU {', '.join(map(str, cut_off))}"
        return [state, Finding(FAIL, "peer access", none, "all GPUs of the group", fix)]
    return [state, Finding(OK, "peer access", f"GPU {index}: to all {len(others)} others")][: 1 + bool(others)]


def _no_gpu() -> Finding:
    unchecked = "not checked: NVLink, peer access, providers torch and nvshmem, copy engine, fused kernels on the GPU"
    if not os.path.exists("/proc/driver/nvidia/version"):
        return Finding(WARN, "gpu visible", f"none; {unchecked}", "a GPU", "run the doctor where training will run")
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    seen = f"an NVIDIA driver, but torch ({built}) sees no GPU; {unchecked}"
    fix = "install a torch for the driver's CUDA version; look at CUDA_VISIBLE_DEVICES and the container's GPU options"
    return Finding(FAIL, "gpu visible", seen, "a GPU for torch", fix)
