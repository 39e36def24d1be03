"""One description of a GPU and its links: measured, or from a data sheet. Estimates, plans, MFU and the doctor ask it.

The H200's figures were measured with the benchmarks of this repository. Of other cards a data sheet says what they do at most;
what no data sheet has is the H200's, in proportion: rates to the peak, copies to NVLink, sums to memory. NCCL's ring reaches
285 of 450 GB/s on H200, where copies reach 360: there NCCL is the limit, so on slower links it keeps its speed, up to that of
copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True)
class System:
    """One kind of GPU with its links. Times in microseconds, bandwidths in GB/s in one direction, rates in bf16 TFLOP/s.

    card: a part of the name that CUDA reports. peak_tflops: of the data sheet. gpus_per_node: of usual servers. is_measured: the
    speeds were measured on this card, and are not in proportion to the H200's.
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
    host_exchange_us: for how long such a transfer keeps the host.
    """

    name: str
    card: str
    capability: tuple[int, int]
    sms: int
    type: str = "cuda"
    peak_tflops: float
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

    @classmethod
    def of(cls, device: torch.device | System) -> System:
        """The present device: a card that is known by its name, or one like the slowest of its generation that is known."""
        if isinstance(device, System):
            return device
        if device.type != "cuda":
            return CPU
        card = torch.cuda.get_device_properties(device)
        known = system_of(card.name)
        if known is None:
            like = SYSTEMS["b200" if card.major >= 10 else "h100-pcie" if card.major == 9 else "a100-pcie"]
            known = replace(like, name=card.name, capability=(card.major, card.minor))
        return replace(known, sms=card.multi_processor_count)

    def in_fp8(self, blockwise: bool) -> System:
        """The system as products in fp8 find it: tensor cores and power allow twice as many. With scales of blocks those of
        cuBLASLt take 1.15 times as long (H200)."""
        times, names = 2 / 1.15 if blockwise else 2.0, ("tile_tflops", "burst_tflops", "sustained_tflops")
        return replace(self, **{name: times * getattr(self, name) for name in names})


H200 = System(
    name="h200", card="H200", capability=(9, 0), sms=132, peak_tflops=989.4, is_measured=True, tile_tflops=850.0,
    burst_tflops=755.0, sustained_tflops=655.0, memory_gbs=3700.0, copy_gbs=360.0, store_gbs=240.0, tile_store_gbs=330.0,
    peer_tile_us=11.0, nccl_pair_gbs=220.0, nccl_ring_gbs=285.0,
)  # fmt: skip
_H200_MEMORY_GBS, _H200_NVLINK_GBS = 4800.0, 450.0  # data sheet
# Processes on CPUs: estimates are not for them, only `type` counts.
CPU = replace(H200, name="cpu", type="cpu", capability=(0, 0), sms=1, is_measured=False)


def _sheet(
    name: str, card: str, major: int, sms: int, peak_tflops: float, memory_gbs: float, nvlink_gbs: float, nic_gbs: float = 50.0
) -> System:  # fmt: skip
    """The H200's figures in proportion to a data sheet's."""
    compute, link = peak_tflops / H200.peak_tflops, nvlink_gbs / _H200_NVLINK_GBS
    copy_gbs, nccl = H200.copy_gbs * link, max(1.0, link)
    return replace(
        H200, name=name, card=card, capability=(major, 0), sms=sms, peak_tflops=peak_tflops, is_measured=False, nic_gbs=nic_gbs,
        tile_tflops=H200.tile_tflops * compute, burst_tflops=H200.burst_tflops * compute,
        sustained_tflops=H200.sustained_tflops * compute, memory_gbs=H200.memory_gbs * memory_gbs / _H200_MEMORY_GBS,
        copy_gbs=copy_gbs, store_gbs=H200.store_gbs * link, tile_store_gbs=H200.tile_store_gbs * link,
        peer_tile_us=H200.peer_tile_us / link, nccl_pair_gbs=min(H200.nccl_pair_gbs * nccl, copy_gbs),
        nccl_ring_gbs=min(H200.nccl_ring_gbs * nccl, copy_gbs),
    )  # fmt: skip


# NVIDIA's data sheets; of the H20 resellers'. Links of H800 and H20 are as in the evaluation of the Ditron paper.
_H20 = _sheet("h20", "H20", 9, 78, 148.0, 4000.0, 450.0, 25.0)
_ALL = (
    H200,
    _sheet("a100", "A100-SXM", 8, 108, 312.0, 2039.0, 300.0, 25.0),
    _sheet("a100-pcie", "A100", 8, 108, 312.0, 1935.0, 300.0, 25.0),
    # The H100 with HBM3 has the H200's SMs, power and NVLink, and was measured beside it.
    replace(_sheet("h100", "H100", 9, 132, 989.4, 3350.0, 450.0), is_measured=True),
    _sheet("h100-pcie", "H100 PCIe", 9, 114, 756.0, 2000.0, 300.0),
    _sheet("h100-nvl", "H100 NVL", 9, 132, 835.5, 3900.0, 300.0),
    _sheet("h200-nvl", "H200 NVL", 9, 132, 835.5, 4800.0, 450.0),
    _sheet("h800", "H800", 9, 132, 989.4, 3350.0, 200.0),
    _sheet("gh200", "GH200", 9, 132, 989.4, 4000.0, 450.0),
    # Its SMs are so few that power does not limit them.
    replace(_H20, burst_tflops=_H20.tile_tflops, sustained_tflops=_H20.tile_tflops),
    _sheet("b200", "B200", 10, 148, 2250.0, 8000.0, 900.0),
    _sheet("gb200", "GB200", 10, 148, 2500.0, 8000.0, 900.0),
)
SYSTEMS: Mapping[str, System] = {system.name: system for system in _ALL}


def system_of(device_name: str) -> System | None:
    """The System of a GPU by the name that CUDA reports; None for one that is not in the table."""
    fits = [system for system in _ALL if system.card in device_name]
    return max(fits, key=lambda system: len(system.card), default=None)
