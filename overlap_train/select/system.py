"""One description of a GPU and its links: measured, or from a data sheet. Estimates, plans, MFU and the doctor ask it.

The H200's figures were measured with the benchmarks of this repository. Of other cards a data sheet says what they do at most;
what no data sheet has is the H200's, in proportion: rates to the peak, copies to NVLink, sums to memory. NCCL's ring reaches
285 of 450 GB/s on H200, where copies reach 360: there NCCL is the limit, so on slower links it keeps its speed, up to that of
copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class System:
    """One kind of GPU with its links. Times in microseconds, bandwidths in GB/s in one direction, rates in bf16 TFLOP/s.

    source: of its facts. peak_tflops, nvlink_gbs: data sheet. nvlink_lanes: 0: none, or not the same in all machines.
    gpus_per_node: of usual servers. is_measured: the speeds were measured on this card, and are not in proportion to the
    H200's.
    tile_tflops: of all SMs while each of them multiplies tiles, at the highest clock.
    burst_tflops, sustained_tflops, settle_us: what power allows in a short GEMM, in a long one, and the time between.
    small_tile: speed of 128 x 128 tiles over that of 128 x 256. portable: of our plain Triton kernels over the library's.
    memory_gbs: reached when partial sums are added. torch_copy: the part of it that torch's copies of blocks apart reach.
    copy_gbs, push_us: of a copy engine to one peer, and what each copy with its signal takes besides.
    store_gbs, tile_store_gbs: stores to peers by a gathering kernel's warps, and of whole tiles.
    peer_tile_us: for how long a tile that is stored at a peer holds its SM in addition.
    nccl_us, nccl_pair_gbs, nccl_ring_gbs: a collective's start, and its bandwidth with two ranks and with more.
    nccl_beside: by which part of its time a GEMM beside it is longer.
    gap_us: between two kernels of a stream. wait_us: a kernel that waits for a signal that is there.
    ramp_us: until a persistent kernel's SMs are busy, and at its end. host_call_us: of a driver call.
    nic_gbs, nic_us: one GPU's share of its node's NICs, and what each transfer between nodes takes besides its bytes.
    host_exchange_us: for how long such a transfer keeps the host. sum_sm_gbs: of one SM that adds partial sums of a node.
    """

    name: str
    source: str
    capability: tuple[int, int]
    sms: int
    type: str = "cuda"
    peak_tflops: float
    nvlink_gbs: float
    nvlink_lanes: int = 18
    gpus_per_node: int = 8
    is_measured: bool = False
    tile_tflops: float
    burst_tflops: float
    sustained_tflops: float
    memory_gbs: float
    copy_gbs: float
    push_us: float = 6.2
    store_gbs: float
    tile_store_gbs: float
    peer_tile_us: float
    nccl_us: float = 19.0
    nccl_pair_gbs: float
    nccl_ring_gbs: float
    gap_us: float = 1.5
    wait_us: float = 2.0
    ramp_us: float = 10.0
    host_call_us: float = 4.0
    nic_gbs: float = 50.0
    nic_us: float = 14.0
    host_exchange_us: float = 340.0
    sum_sm_gbs: float = 60.0

    @classmethod
    def of(cls, device: torch.device | System) -> System:
        """The present device: a card that is known by its name, or what torch says of another one."""
        if isinstance(device, System):
            return device
        if device.type != "cuda":
            return CPU
        card = torch.cuda.get_device_properties(device)
        known = system_of(card.name)
        return _by_torch(card) if known is None else replace(known, sms=card.multi_processor_count)


H200 = System(
    name="h200", source="NVIDIA H200 SXM data sheet; measured in benchmarks/h200x2 and h200x4", capability=(9, 0), sms=132,
    peak_tflops=989.4, nvlink_gbs=450.0, is_measured=True, tile_tflops=850.0, burst_tflops=755.0, sustained_tflops=655.0,
    memory_gbs=3700.0, copy_gbs=360.0, store_gbs=240.0, tile_store_gbs=330.0, peer_tile_us=11.0, nccl_pair_gbs=220.0,
    nccl_ring_gbs=285.0,
)  # fmt: skip
_H200_MEMORY_GBS = 4800.0  # data sheet
# Processes on CPUs: estimates are not for them, only `type` counts.
CPU = replace(H200, name="cpu", source="none", type="cpu", capability=(0, 0), sms=1, is_measured=False)


@dataclass(frozen=True)
class Sheet:
    """What a data sheet says. power_limited: long GEMMs run below what the SMs could do, as on H200."""

    source: str
    capability: tuple[int, int]
    sms: int
    peak_tflops: float
    memory_gbs: float
    nvlink_gbs: float
    nic_gbs: float = 50.0
    nvlink_lanes: int = 18
    power_limited: bool = True


def _sheet(card: str, *figures: Any, **more: Any) -> Sheet:
    return Sheet(f"NVIDIA {card} data sheet", *figures, **more)


_IN_DITRON = "; links as in the evaluation of the Ditron paper"
_H100 = _sheet("H100 SXM", (9, 0), 132, 989.4, 3350.0, 450.0)
SHEETS = {
    "a100": _sheet("A100 80GB SXM", (8, 0), 108, 312.0, 2039.0, 300.0, 25.0, nvlink_lanes=12),
    "a100-pcie": _sheet("A100 80GB PCIe", (8, 0), 108, 312.0, 1935.0, 300.0, 25.0, nvlink_lanes=0),
    "h100": _H100,
    "h100-pcie": _sheet("H100 PCIe", (9, 0), 114, 756.0, 2000.0, 300.0, nvlink_lanes=0),
    "h100-nvl": _sheet("H100 NVL", (9, 0), 132, 835.5, 3900.0, 300.0, nvlink_lanes=0),
    "h200-nvl": _sheet("H200 NVL", (9, 0), 132, 835.5, 4800.0, 450.0, nvlink_lanes=0),
    "h800": replace(_H100, source=_H100.source + _IN_DITRON, nvlink_gbs=200.0, nvlink_lanes=8),
    "h20": Sheet("resellers of the H20" + _IN_DITRON, (9, 0), 78, 148.0, 4000.0, 450.0, 25.0, power_limited=False),
    "b200": _sheet("DGX B200", (10, 0), 148, 2250.0, 8000.0, 900.0),
    "gb200": _sheet("GB200 NVL72", (10, 0), 148, 2500.0, 8000.0, 900.0),
}  # fmt: skip


def scaled(name: str, sheet: Sheet) -> System:
    """The H200's figures in proportion to a data sheet's."""
    compute, link = sheet.peak_tflops / H200.peak_tflops, sheet.nvlink_gbs / H200.nvlink_gbs
    tile, copies, nccl = H200.tile_tflops * compute, H200.copy_gbs * link, max(1.0, link)
    return replace(
        H200, name=name, source=sheet.source, capability=sheet.capability, sms=sheet.sms, peak_tflops=sheet.peak_tflops,
        nvlink_gbs=sheet.nvlink_gbs, nvlink_lanes=sheet.nvlink_lanes, nic_gbs=sheet.nic_gbs, is_measured=False, tile_tflops=tile,
        burst_tflops=H200.burst_tflops * compute if sheet.power_limited else tile,
        sustained_tflops=H200.sustained_tflops * compute if sheet.power_limited else tile,
        memory_gbs=H200.memory_gbs * sheet.memory_gbs / _H200_MEMORY_GBS, copy_gbs=copies, store_gbs=H200.store_gbs * link,
        tile_store_gbs=H200.tile_store_gbs * link, peer_tile_us=H200.peer_tile_us / link,
        nccl_pair_gbs=min(H200.nccl_pair_gbs * nccl, copies), nccl_ring_gbs=min(H200.nccl_ring_gbs * nccl, copies),
    )  # fmt: skip


# The H100 with HBM3 has the H200's SMs, power and NVLink, and was measured beside it.
_MEASURED_TOO = ("h100",)
SYSTEMS: Mapping[str, System] = {
    "h200": H200,
    **{name: replace(scaled(name, sheet), is_measured=name in _MEASURED_TOO) for name, sheet in SHEETS.items()},
}

# By a part of the name that CUDA reports; the first that fits counts.
_CARDS = {
    "H200 NVL": "h200-nvl", "H200": "h200", "H100 PCIe": "h100-pcie", "H100 NVL": "h100-nvl", "H100": "h100", "H800": "h800",
    "H20": "h20", "GB200": "gb200", "B200": "b200", "A100-SXM": "a100", "A100": "a100-pcie",
}  # fmt: skip


def system_of(device_name: str) -> System | None:
    """The System of a GPU by the name that CUDA reports; None for one that is not in the table."""
    return next((SYSTEMS[system] for part, system in _CARDS.items() if part in device_name), None)


# Of a card that no table has. Floating-point operations of an SM in a clock, in dense bf16, and GB/s of NVLink, by capability.
_OPERATIONS = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192}
_LINKS = {(8, 0): 300.0, (9, 0): 450.0, (10, 0): 900.0, (10, 3): 900.0}
_OTHER_OPERATIONS, _PCIE_GBS = 1024, 32.0


def _by_torch(card: Any) -> System:
    """What torch's properties tell of a device; clocks are in kHz, the bus in bits."""
    capability = (card.major, card.minor)
    peak = _OPERATIONS.get(capability, _OTHER_OPERATIONS) * card.multi_processor_count * card.clock_rate * 1e3 / 1e12
    memory = 2 * card.memory_clock_rate * card.memory_bus_width / 8 / 1e6
    link = _LINKS.get(capability, _PCIE_GBS)
    source = "torch's properties of the device"
    return scaled(card.name, Sheet(source, capability, card.multi_processor_count, peak, memory, link, nvlink_lanes=0))
