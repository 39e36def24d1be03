"""What the doctor has measured, as a system that `overlap-train plan --system FILE` plans for."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ...planning.cost import power_us
from ...planning.hardware import hardware_of
from ...planning.machines import CARDS, SYSTEMS, System
from .network import NCCL, NVSHMEM, name_of
from .report import Finding

# Operators send blocks of 8 to 64 MiB. On H200 these go at 360 GB/s where the doctor's 128 MiB go at 380.
_OF_PROBE = 360 / 380
_FLOPS = 2.0 * 8192**3  # of the doctor's product
_ASSUMED = ("memory_gbs", "nvlink_gbs", "gpus_per_node")  # of another card of the same family
_RATES = ("tile_tflops", "burst_tflops", "sustained_tflops")


def write_system(path: Path, findings: Sequence[Finding], plays_nodes: bool) -> str:
    """Write the file. Returns a line that says what became of it. plays_nodes: ranks of one machine play several nodes, so no
    network was measured."""
    here = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if here else "no GPU"
    sms = torch.cuda.get_device_properties().multi_processor_count if here else 0
    system = probed(name, findings, crossed=not plays_nodes, sms=sms)
    if system is None:
        return f"{path} not written: {name} is none of {', '.join(SYSTEMS)}, or its product was not measured"
    system = replace(system, connections=_connections(system))
    path.write_text(json.dumps(asdict(system), indent=1) + "\n")
    other = f"; {', '.join(system.assumed)} are those of another card" if system.assumed else ""
    return f"{path}: {system.name} with what was measured: {', '.join(system.measured)}{other}"


def _connections(system: System) -> int:
    """As training started like this would have it."""
    word = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return int(word) if word.isdecimal() and int(word) else system.connections


def probed(device_name: str, findings: Sequence[Finding], crossed: bool = True, sms: int = 0) -> System | None:
    """The named system with this machine's speed of products, of copies over each rank's slowest link, and (crossed) of gathers
    between nodes: medians over ranks. Other figures are of the H200, or scaled from it. sms: of the device; 0: there is none."""
    base = _card(device_name, sms)
    products = _figures(findings, "gemm")
    if base is None or not products:
        return None
    ratio = statistics.median(products) / (_FLOPS * 1e-6 / power_us(base, _FLOPS))
    rates = {rate: round(ratio * getattr(base, rate), 1) for rate in _RATES}
    made = replace(base, source=f"overlap-train doctor on {device_name}", **rates, measured=_RATES)
    network = _of_network(findings) if crossed else []
    probes = (("copy_gbs", _OF_PROBE, _figures(findings, "link")), ("nic_gbs", 1.0, network))
    links: dict[str, Any] = {name: round(part * statistics.median(gbs), 1) for name, part, gbs in probes if gbs}
    return replace(made, **links, measured=(*_RATES, *links))


def _card(device_name: str, sms: int) -> System | None:
    """The facts of a card. One that is not in the table has those of its family, as far as nothing else is known: the device
    knows its SMs, and hardware.py the products of variants."""
    family = CARDS.get(device_name) or next((name for name in SYSTEMS if name.upper() in device_name.upper()), "")
    if not family:
        return None
    base = SYSTEMS[family]
    card = replace(base, sms=sms or base.sms)
    if device_name in CARDS:
        return card
    known, assumed = hardware_of(device_name), _ASSUMED if sms else ("sms", *_ASSUMED)
    if known is None:
        assumed = ("peak_tflops", *assumed)
    else:
        card = replace(card, peak_tflops=known.peak_tflops)
    return replace(card, name=device_name.removeprefix("NVIDIA ").lower(), assumed=assumed)


def _of_network(findings: Sequence[Finding]) -> list[float]:
    """GB/s of the transport that groups take by themselves, or else of the one that was asked for."""
    return _figures(findings, name_of(NCCL)) or _figures(findings, name_of(NVSHMEM))


def _figures(findings: Sequence[Finding], name: str) -> list[float]:
    return [finding.figure for finding in findings if finding.name == name and finding.figure is not None]
