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

    source: of its facts. peak_tflops, nvlink_gbs: data sheet. gpus_per_node: of usual servers. is_measured: the speeds were
    measured on this card, and are not in proportion to the H200's.
    tile_tflops: of all SMs while each of them multiplies tiles, at the highest clock. burst_tflops, sustained_tflops: what power
    allows in a short GEMM, and in a long one.
    memory_gbs: reached when partial sums are added.
    copy_gbs, push_us: of a copy engine to one peer, and what each copy with its signal takes besides.
    store_gbs, tile_store_gbs: stores to peers by a gathering kernel's warps, and of whole tiles.
    peer_tile_us: for how long a tile that is stored at a peer holds its SM in addition.
    nccl_us, nccl_pair_gbs, nccl_ring_gbs: a collective's start, and its bandwidth with two ranks and with more.
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
        """The present device: a card that is known by its name, or one like it."""
        if isinstance(device, System):
            return device
        if device.type != "cuda":
            return CPU
        card = torch.cuda.get_device_properties(device)
        known = system_of(card.name)
        return _unknown(card) if known is None else replace(known, sms=card.multi_processor_count)


H200 = System(
    name="h200", source="NVIDIA H200 SXM data sheet; measured in benchmarks/h200x2 and h200x4", capability=(9, 0), sms=132,
    peak_tflops=989.4, nvlink_gbs=450.0, is_measured=True, tile_tflops=850.0, burst_tflops=755.0, sustained_tflops=655.0,
    memory_gbs=3700.0, copy_gbs=360.0, store_gbs=240.0, tile_store_gbs=330.0, peer_tile_us=11.0, nccl_pair_gbs=220.0,
    nccl_ring_gbs=285.0,
)  # fmt: skip
_H200_MEMORY_GBS = 4800.0  # data sheet
# Processes on CPUs: estimates are not for them, only `type` counts.
CPU = replace(H200, name="cpu", source="none", type="cpu", capability=(0, 0), sms=1, is_measured=False)


_IN_PROPORTION = ("copy_gbs", "store_gbs", "tile_store_gbs")  # to NVLink


def _scaled(
    name: str, source: str, capability: tuple[int, int], sms: int, peak_tflops: float, memory_gbs: float, nvlink_gbs: float,
    nic_gbs: float = H200.nic_gbs, power_limited: bool = True,
) -> System:  # fmt: skip
    """The H200's figures in proportion to a data sheet's. power_limited: long GEMMs run below what the SMs could do, as there."""
    compute, link = peak_tflops / H200.peak_tflops, nvlink_gbs / H200.nvlink_gbs
    tile, nccl = H200.tile_tflops * compute, max(1.0, link)
    links = {field: getattr(H200, field) * link for field in _IN_PROPORTION}
    return replace(
        H200, name=name, source=source, capability=capability, sms=sms, peak_tflops=peak_tflops, nvlink_gbs=nvlink_gbs,
        nic_gbs=nic_gbs, is_measured=False, tile_tflops=tile,
        burst_tflops=H200.burst_tflops * compute if power_limited else tile,
        sustained_tflops=H200.sustained_tflops * compute if power_limited else tile,
        memory_gbs=H200.memory_gbs * memory_gbs / _H200_MEMORY_GBS, peer_tile_us=H200.peer_tile_us / link,
        nccl_pair_gbs=min(H200.nccl_pair_gbs * nccl, links["copy_gbs"]),
        nccl_ring_gbs=min(H200.nccl_ring_gbs * nccl, links["copy_gbs"]), **links,
    )  # fmt: skip


def _sheet(name: str, card: str, *figures: Any, **more: Any) -> System:
    return _scaled(name, f"NVIDIA {card} data sheet", *figures, **more)


_IN_DITRON = "; links as in the evaluation of the Ditron paper"
_ALL = (
    H200,
    _sheet("a100", "A100 80GB SXM", (8, 0), 108, 312.0, 2039.0, 300.0, 25.0),
    _sheet("a100-pcie", "A100 80GB PCIe", (8, 0), 108, 312.0, 1935.0, 300.0, 25.0),
    # The H100 with HBM3 has the H200's SMs, power and NVLink, and was measured beside it.
    replace(_sheet("h100", "H100 SXM", (9, 0), 132, 989.4, 3350.0, 450.0), is_measured=True),
    _sheet("h100-pcie", "H100 PCIe", (9, 0), 114, 756.0, 2000.0, 300.0),
    _sheet("h100-nvl", "H100 NVL", (9, 0), 132, 835.5, 3900.0, 300.0),
    _sheet("h200-nvl", "H200 NVL", (9, 0), 132, 835.5, 4800.0, 450.0),
    _sheet("h800", "H100 SXM" + _IN_DITRON, (9, 0), 132, 989.4, 3350.0, 200.0),
    _scaled("h20", "resellers of the H20" + _IN_DITRON, (9, 0), 78, 148.0, 4000.0, 450.0, 25.0, power_limited=False),
    _sheet("b200", "DGX B200", (10, 0), 148, 2250.0, 8000.0, 900.0),
    _sheet("gb200", "GB200 NVL72", (10, 0), 148, 2500.0, 8000.0, 900.0),
)  # fmt: skip
SYSTEMS: Mapping[str, System] = {system.name: system for system in _ALL}

# By a part of the name that CUDA reports; the first that fits counts.
_CARDS = {
    "H200 NVL": "h200-nvl", "H200": "h200", "H100 PCIe": "h100-pcie", "H100 NVL": "h100-nvl", "H100": "h100", "H800": "h800",
    "H20": "h20", "GB200": "gb200", "B200": "b200", "A100-SXM": "a100", "A100": "a100-pcie",
}  # fmt: skip


def system_of(device_name: str) -> System | None:
    """The System of a GPU by the name that CUDA reports; None for one that is not in the table."""
    return next((SYSTEMS[system] for part, system in _CARDS.items() if part in device_name), None)


def _unknown(card: Any) -> System:
    """A card that no table has, by what torch tells of it: as the slowest one of its generation that a table has."""
    like = SYSTEMS["b200" if card.major >= 10 else "h100-pcie" if card.major == 9 else "a100-pcie"]
    source = f"not known: that of {like.name}"
    capability = (card.major, card.minor)
    return replace(like, name=card.name, source=source, capability=capability, sms=card.multi_processor_count)
