"""The GPU of this rank (in a single process: all GPUs): state, peer access, NVLink."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ...select.system import system_of
from .report import Finding, fail, ok, warn

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
    """Facts about one GPU. peer_access, nvlink: by the index of each other GPU; nvlink is None where the driver does not tell."""

    index: int
    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int
    uuid: str
    peer_access: dict[int, bool] = field(default_factory=dict)
    nvlink: dict[int, bool | None] = field(default_factory=dict)


def check_gpus(gpus: Sequence[Gpu], smi: dict[str, Smi]) -> list[Finding]:
    """Findings about `gpus`, this rank's or all; `smi` by UUID."""
    found: list[Finding] = []
    for gpu in gpus:
        found.append(_state(gpu))
        if gpu.uuid in smi:
            found += _smi_findings(gpu, smi[gpu.uuid])
        found += _peers(gpu)
    return found


def without_gpu() -> Finding:
    """The line of a machine without GPU: what cannot be checked here."""
    unchecked = "not checked: NVLink, peer access, providers torch and nvshmem, copy engine, fused kernels on the GPU"
    if not os.path.exists("/proc/driver/nvidia/version"):
        return warn("gpu visible", f"none; {unchecked}", "a GPU", "run the doctor where training will run")
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    seen = f"an NVIDIA driver, but torch ({built}) sees no GPU; {unchecked}"
    fix = "install a torch for the driver's CUDA version; look at CUDA_VISIBLE_DEVICES and the container's GPU options"
    return fail("gpu visible", seen, "a GPU for torch", fix)


def missing_gpu(local_rank: int, count: int) -> Finding:
    """The finding where a node has more ranks than GPUs that each of them sees."""
    fix = (
        "start as many ranks as GPUs, and let each rank see all GPUs of its node (no CUDA_VISIBLE_DEVICES for each rank, Slurm: "
        "--gpu-bind=none): a peer that is not visible cannot be mapped"
    )
    measured = f"local rank {local_rank}, but {count} visible GPUs"
    return fail("gpu visible", measured, f"more than {local_rank} visible GPUs", fix)


def read_gpu(index: int, others: Sequence[int]) -> Gpu:
    """Facts about one GPU, and its links to others that ranks of this node have."""
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


def _state(gpu: Gpu) -> Finding:
    name, capability = "gpu", "sm_" + "".join(map(str, gpu.capability))
    used, total = (gpu.total_bytes - gpu.free_bytes) / _GIB, gpu.total_bytes / _GIB
    measured = f"GPU {gpu.index}: {gpu.name}, {capability}, {used:.1f} of {total:.0f} GiB in use"
    if gpu.capability < (8, 0):
        return fail(name, measured, "sm_80 or newer for bf16", "use a newer GPU, or fp16 with the method chunked")
    if used > 0.1 * total:
        fix = "end the other processes on this GPU (nvidia-smi): they take memory and time"
        return warn(name, measured, "at most a tenth in use before training", fix)
    return ok(name, measured)


def _smi_findings(gpu: Gpu, smi: Smi) -> Iterator[Finding]:
    me = f"GPU {gpu.index}"
    if smi.mig.lower() == "enabled":
        fix = "let the administrator turn MIG off: its parts have neither NVLink nor peer access"
        yield fail("gpu mig", f"{me}: enabled", "disabled", fix)
    if smi.compute_mode.lower() == "prohibited":
        yield fail("gpu mode", f"{me}: {smi.compute_mode}", "Default", "nvidia-smi -c DEFAULT (administrator)")
    if smi.ecc_errors.isdigit() and int(smi.ecc_errors):
        fix = "the memory of this GPU is failing: drain the host and have the GPU reset or replaced"
        yield fail("gpu memory", f"{me}: {smi.ecc_errors} uncorrected errors", "0", fix)
    model = system_of(gpu.name)
    wanted = model.nvlink_lanes if model else 0
    if smi.lanes is None or not gpu.peer_access or not (wanted or smi.lanes):
        return
    measured, expected = f"{me}: {smi.lanes} lanes active", f"{wanted} lanes" if wanted else "not judged: unknown GPU"
    if smi.lanes < wanted:
        fix = "nvidia-smi nvlink -s and -e on this host; a lane that stays off is a fault of GPU, NVSwitch or fabric manager"
        yield fail("nvlink", measured, expected, fix)
    else:
        yield ok("nvlink", measured, expected)


def _peers(gpu: Gpu) -> list[Finding]:
    name, me = "peer access", f"GPU {gpu.index}"
    if not gpu.peer_access:
        return []
    cut_off = [other for other, reachable in gpu.peer_access.items() if not reachable]
    if cut_off:
        fix = "nvidia-smi topo -p2p r; look for IOMMU or ACS, a container without all GPUs, a stopped fabric manager"
        return [fail(name, f"{me}: none to GPU {', '.join(map(str, cut_off))}", "all GPUs of the group", fix)]
    slow = [other for other, nvlink in gpu.nvlink.items() if nvlink is False]
    if slow:
        fix = "works, but over PCIe communication takes longer than it can be hidden; use GPUs that NVLink joins"
        return [warn(name, f"{me}: no NVLink to GPU {', '.join(map(str, slow))}", "NVLink", fix)]
    link = "by NVLink" if all(gpu.nvlink.values()) else "NVLink unknown: the driver does not tell"
    return [ok(name, f"{me}: to all {len(gpu.peer_access)} others, {link}")]


def read_smi() -> dict[str, Smi]:
    """nvidia-smi's view by UUID, in a child process with a limit: a broken driver blocks its callers. Empty without it."""
    lanes = active_lanes(_lines("nvidia-smi", "nvlink", "-s"))
    found = {}
    for line in _lines("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"):
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
