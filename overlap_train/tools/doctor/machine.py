"""What one rank finds on its own machine: packages and their versions, and its GPU."""

from __future__ import annotations

import importlib.metadata
import os
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ...select.table import installed
from .job import FAIL, OK, WARN, Finding

PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine")
FOR_GPUS = ("nvshmem4py-cu13", "nvidia-nvshmem-cu13", "cuda-core", "nvidia-nccl-cu13")

# The doctor never uses NVLink multicast, and sets these before CUDA starts: where multicast is broken, merely setting it up can
# take the host's GPUs down. No operator of ours needs it.
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def check_versions(on_gpu: bool) -> list[Finding]:
    """One finding for each package: its version, against the range of our metadata."""
    found, ranges = [], _ranges()
    for package in PACKAGES + (FOR_GPUS if on_gpu else ()):
        # That of a source build of torch has no other place.
        version = torch.__version__ if package == "torch" else installed(package)
        allowed = ranges.get(package, SpecifierSet())
        fits = allowed.contains(version, prereleases=True) if version else not allowed
        fix = "" if fits else f'if you want it, or something fails: pip install "{package}{allowed}"'
        status = OK if fits else WARN
        found.append(Finding(status, f"version {package}", version or "not installed", str(allowed), fix))
    return found


def _ranges() -> dict[str, SpecifierSet]:
    """The ranges of versions that we ask for, extras included. In a checkout that is not installed pyproject.toml says them."""
    if installed("overlap-train") is not None:
        lines = importlib.metadata.requires("overlap-train") or []
    else:
        project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
        lines = list(chain(project["dependencies"], *project["optional-dependencies"].values()))
    return {needed.name: needed.specifier for needed in map(Requirement, lines)}


def disagreements(findings: Sequence[Finding]) -> list[Finding]:
    """Findings of all ranks -> a FAIL for each rank where something has another version, or device, than on the first rank."""
    first = {finding.name: finding.measured for finding in reversed(findings)}
    fix = "install the same packages on every host, and give all ranks a GPU or none: a group runs the same code"
    return [
        replace(f, name=f"{f.name}: ranks differ", status=FAIL, expected=f"{first[f.name]}, as on rank 0", fix=fix)
        for f in findings
        if f.measured != first[f.name]
    ]


def check_gpu(index: int, used: int) -> list[Finding]:
    """State of GPU `index` of this node, and its access to the others of the `used` GPUs that ranks of this node have."""
    count = torch.cuda.device_count()
    if count == 0:
        seen, status = "none, so GPUs, links and the operators on them are not checked", WARN
        if os.path.exists("/proc/driver/nvidia/version"):
            seen, status = f"an NVIDIA driver, but none for torch, which is built for CUDA {torch.version.cuda}", FAIL
        fix = "run where training will run, with a torch for the driver; see CUDA_VISIBLE_DEVICES, the container's GPU options"
        return [Finding(status, "gpu visible", seen, "a GPU", fix)]
    if index >= count:
        fix = (
            "start as many ranks as GPUs, and let each rank see all GPUs of its node (no CUDA_VISIBLE_DEVICES for each rank, "
            "Slurm: --gpu-bind=none): a peer that is not visible cannot be mapped"
        )
        measured = f"local rank {index}, but {count} visible GPUs"
        return [Finding(FAIL, "gpu visible", measured, f"more than {index} visible GPUs", fix)]
    torch.cuda.set_device(index)
    card, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
    in_use = f"{(total - free) / 2**30:.1f} of {total / 2**30:.0f} GiB in use"
    state = Finding(OK, "gpu", f"GPU {index}: {card.name}, sm_{card.major}{card.minor}, {in_use}")
    if card.major < 8:
        fix = "use a newer GPU, or fp16 with the method chunked"
        state = replace(state, status=FAIL, expected="sm_80 or newer for bf16", fix=fix)
    elif free < 0.9 * total:
        fix = "end the other processes on this GPU (nvidia-smi): they take memory and time"
        state = replace(state, status=WARN, expected="at most a tenth in use before training", fix=fix)
    others = [other for other in range(min(count, used)) if other != index]
    cut_off = [other for other in others if not torch.cuda.can_device_access_peer(index, other)]
    access = Finding(OK, "peer access", f"GPU {index}: to all {len(others)} others")
    if cut_off:
        fix = "nvidia-smi topo -p2p r; MIG, IOMMU or ACS, a container without all GPUs, a stopped fabric manager"
        none = f"GPU {index}: none to GPU {', '.join(map(str, cut_off))}"
        access = Finding(FAIL, "peer access", none, "all GPUs of the group", fix)
    return [state, access] if others else [state]
