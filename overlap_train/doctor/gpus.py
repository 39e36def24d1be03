"""The GPU of this rank (in a single process: all GPUs): state, peer access, NVLink."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .hardware import model_of
from .place import Place
from .report import Finding

_GIB = 1 << 30
_QUERY = "uuid,compute_mode,mig.mode.current,ecc.errors.uncorrected.volatile.total"


@dataclass(frozen=True)
class Smi:
    """What nvidia-smi says about one GPU; lanes: active NVLink lanes. None: it does not say."""

    compute_mode: str
    mig: str
    ecc_errors: str
    lanes: int | None


@dataclass(frozen=True)
class Gpu:
    """peer_access, nvlink: by the index of each other GPU; nvlink is None where the driver does not tell."""

    index: int
    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int
    uuid: str
    peer_access: dict[int, bool] = field(default_factory=dict)
    nvlink: dict[int, bool | None] = field(default_factory=dict)


def check_gpus(place: Place, gpus: Sequence[Gpu], smi: dict[str, Smi]) -> list[Finding]:
    """Findings about `gpus`, this rank's or all; `smi` by UUID."""
    found: list[Finding] = []
    for gpu in gpus:
        found += [_state(place, gpu), *_smi_findings(place, gpu, smi.get(gpu.uuid)), *_peers(place, gpu)]
    return found


def without_gpu(place: Place) -> list[Finding]:
    """The line of a machine without GPU: what cannot be checked here."""
    unchecked = "not checked: NVLink, peer access, providers torch and nvshmem, copy engine, fused kernels on the GPU"
    if os.path.exists("/proc/driver/nvidia/version"):
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        fix = "install a torch for the driver's CUDA version; look at CUDA_VISIBLE_DEVICES and the container's GPU options"
        return [
            place.fail(
                "gpu visible", f"an NVIDIA driver, but torch ({built}) sees no GPU; {unchecked}", "a GPU for torch", fix
            )
        ]
    return [place.warn("gpu visible", f"none; {unchecked}", "a GPU", "run the doctor where training will run")]


def read_gpus(place: Place, used: Sequence[int], alone: bool) -> list[Gpu]:
    """Facts about this rank's GPU, or in a process alone about all of `used`, the GPUs that ranks of this node have."""
    mine = used if alone else [place.device.index]
    return [_read(index, [other for other in used if other != index]) for index in mine]


def missing_gpu(place: Place, local_rank: int, count: int) -> Finding:
    """More ranks on a node than GPUs that each of them sees."""
    fix = (
        "start as many ranks as GPUs, and let each rank see all GPUs of its node (no CUDA_VISIBLE_DEVICES for each rank, Slurm: "
        "--gpu-bind=none): a peer that is not visible cannot be mapped"
    )
    return place.fail(
        "gpu visible", f"local rank {local_rank}, but {count} visible GPUs", f"more than {local_rank} visible GPUs", fix
    )


def _read(index: int, others: Sequence[int]) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    access = {other: torch.cuda.can_device_access_peer(index, other) for other in others}
    links = {other: _has_nvlink(index, other) for other in others}
    uuid = f"GPU-{getattr(properties, 'uuid', index)}"
    capability = (properties.major, properties.minor)
    return Gpu(index, properties.name, capability, free, total, uuid, access, links)


def _has_nvlink(index: int, other: int) -> bool | None:
    """GPUs that reach each other's memory by native atomics are joined by NVLink; over PCIe they are not."""
    try:
        from cuda.bindings import driver

        attribute = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        status, value = driver.cuDeviceGetP2PAttribute(attribute, index, other)
    except Exception:  # cuda-bindings is missing or raises a class of its own
        return None
    return bool(value) if status == driver.CUresult.CUDA_SUCCESS else None


def _state(place: Place, gpu: Gpu) -> Finding:
    name, capability = "gpu", "sm_" + "".join(map(str, gpu.capability))
    used, total = (gpu.total_bytes - gpu.free_bytes) / _GIB, gpu.total_bytes / _GIB
    measured = f"GPU {gpu.index}: {gpu.name}, {capability}, {used:.1f} of {total:.0f} GiB in use"
    if gpu.capability < (8, 0):
        return place.fail(name, measured, "sm_80 or newer for bf16", "use a newer GPU, or fp16 with the method chunked")
    if used > 0.1 * total:
        fix = "end the other processes on this GPU (nvidia-smi): they take memory and time"
        return place.warn(name, measured, "at most a tenth in use before training", fix)
    return place.ok(name, measured)


def _smi_findings(place: Place, gpu: Gpu, smi: Smi | None) -> list[Finding]:
    if smi is None:
        return []
    found = []
    if smi.mig.lower() == "enabled":
        fix = "let the administrator turn MIG off: its parts have neither NVLink nor peer access"
        found.append(place.fail("gpu mig", f"GPU {gpu.index}: enabled", "disabled", fix))
    if smi.compute_mode.lower() == "prohibited":
        found.append(
            place.fail(
                "gpu mode", f"GPU {gpu.index}: {smi.compute_mode}", "Default", "nvidia-smi -c DEFAULT (administrator)"
            )
        )
    if smi.ecc_errors.isdigit() and int(smi.ecc_errors):
        fix = "the memory of this GPU is failing: drain the host and have the GPU reset or replaced"
        found.append(place.fail("gpu memory", f"GPU {gpu.index}: {smi.ecc_errors} uncorrected errors", "0", fix))
    return found + _lanes(place, gpu, smi.lanes)


def _lanes(place: Place, gpu: Gpu, lanes: int | None) -> list[Finding]:
    model = model_of(gpu.name)
    if lanes is None or not gpu.peer_access or (model is None and not lanes):
        return []
    name, measured = "nvlink", f"GPU {gpu.index}: {lanes} lanes active"
    if model is None:
        return [place.ok(name, measured, "not judged: unknown GPU")]
    if lanes < model.nvlink_lanes:
        fix = "nvidia-smi nvlink -s and -e on this host; a lane that stays off is a fault of GPU, NVSwitch or fabric manager"
        return [place.fail(name, measured, f"{model.nvlink_lanes} lanes", fix)]
    return [place.ok(name, measured, f"{model.nvlink_lanes} lanes")]


def _peers(place: Place, gpu: Gpu) -> list[Finding]:
    name, me = "peer access", f"GPU {gpu.index}"
    if not gpu.peer_access:
        return []
    cut_off = [other for other, reachable in gpu.peer_access.items() if not reachable]
    if cut_off:
        fix = "nvidia-smi topo -p2p r; look for IOMMU or ACS, a container without all GPUs, a stopped fabric manager"
        return [place.fail(name, f"{me}: none to GPU {', '.join(map(str, cut_off))}", "all GPUs of the group", fix)]
    slow = [other for other, nvlink in gpu.nvlink.items() if nvlink is False]
    if slow:
        fix = "works, but over PCIe communication takes longer than it can be hidden; use GPUs that NVLink joins"
        return [place.warn(name, f"{me}: no NVLink to GPU {', '.join(map(str, slow))}", "NVLink", fix)]
    told = "by NVLink" if all(gpu.nvlink.values()) else "NVLink unknown: the driver does not tell"
    return [place.ok(name, f"{me}: to all {len(gpu.peer_access)} others, {told}")]


def read_smi() -> dict[str, Smi]:
    """nvidia-smi's view by UUID, in a child process with a limit: a broken driver blocks its callers. Empty without it."""
    states = _lines("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    lanes = active_lanes(_lines("nvidia-smi", "nvlink", "-s"))
    found = {}
    for line in states:
        uuid, *values = [value.strip() for value in line.split(",")]
        if len(values) == 3:
            found[uuid] = Smi(values[0], values[1], values[2], lanes.get(uuid))
    return found


def active_lanes(lines: Sequence[str]) -> dict[str, int]:
    """`nvidia-smi nvlink -s` -> active lanes by UUID: those with a rate. A GPU whose lanes are not listed (as in some
    virtual machines) is left out."""
    found: dict[str, int] = {}
    uuid = ""
    for line in lines:
        heading, lane = re.search(r"UUID:\s*(GPU-[0-9a-fA-F-]+)", line), re.search(r"Link \d+:\s*(.*)", line)
        if heading:
            uuid = heading[1]
        elif lane:
            found[uuid] = found.get(uuid, 0) + bool(re.match(r"[\d.]+ *GB/s", lane[1]))
    return found


def _lines(*command: str) -> list[str]:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return result.stdout.splitlines() if result.returncode == 0 else []
