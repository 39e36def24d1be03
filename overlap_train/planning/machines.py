"""Machines to plan for: what their GPUs and links do. Each figure is measured, or taken from a data sheet and scaled.

Those of the H200 were measured with the benchmarks of this repository (docs/planner-model.md says where). For the others, peaks
come from the makers' data sheets. What no data sheet has is the H200's, in proportion to the peak. `System.measured` names the
fields that were measured on that machine; a plan lists the rest.

NCCL's ring reaches 285 of 450 GB/s on H200, where copies reach 360: there NCCL is the limit, and not the link. On slower links it
keeps its speed, up to that of copies. NCCL's own model has it so for the A100: at most 235 of 300 GB/s (src/graph/tuning.cc).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from .hardware import SUM_GBS

_BLACKWELL = (10, 0)
# Of CUDA_DEVICE_MAX_CONNECTIONS: what Megatron-Core asks for before Blackwell, and what CUDA takes where nobody sets it.
_ASKED_FOR, _OF_CUDA = 1, 8
# Fitted to the 64 overlapping calls of h200x2/hierarchical (of ffc543d3) and h100x4/hierarchical, NCCL over sockets, beside
# host_call_us: 20 % off in the mean, from -55 % (calls of one or two exchanges) to +57 %; 23 % off in a later record. In an older
# one, h100x2/hierarchical, whose blocks went in other chunks, an exchange took 0.05 to 0.6 ms. No other network was tried.
_HOST_EXCHANGE_US = 340.0


@dataclass(frozen=True)
class System:
    """One kind of GPU with its links. Times in microseconds, bandwidths in GB/s in one direction, rates in bf16 TFLOP/s.

    capability: CUDA's. peak_tflops, nvlink_gbs: data sheet. gpus_per_node: of usual servers.
    connections: CUDA_DEVICE_MAX_CONNECTIONS. 1: all streams share a hardware queue; more: each has its own.
    nic_gbs, nic_us: one GPU's share of its node's NICs, and what each network transfer takes besides its bytes.
    host_exchange_us: for how long an exchange between nodes keeps the host: its ordering, NCCL's call, and its arrival.
    sum_sm_gbs: of one SM that adds partial sums of a node, where few do.
    tile_tflops: of all SMs while each of them multiplies tiles, at the highest clock.
    burst_tflops, sustained_tflops, settle_us: what power allows in a short product, in a long one, and the time between.
    small_tile: speed of 128 x 128 tiles over that of 128 x 256. portable: of our plain Triton kernels over the library's.
    memory_gbs: reached when partial sums are added. torch_copy: the part of it that torch's copies of blocks apart reach.
    copy_gbs, push_us: of a copy engine to one peer, and what each copy with its signal takes besides.
    store_gbs, tile_store_gbs: stores to peers by a gathering kernel's warps, and of whole tiles.
    peer_tile_us: for how long a tile that is stored at a peer holds its SM in addition.
    nccl_us, nccl_pair_gbs, nccl_ring_gbs: a collective's start, and its bandwidth with two ranks and with more.
    nccl_beside: by which part of its time a product beside it is longer.
    gap_us: between two kernels of a stream. wait_us: a kernel that waits for a signal that is there.
    ramp_us: until a persistent kernel's SMs are busy, and at its end. host_call_us: of a driver call.
    measured: which of these were measured on this machine. assumed: facts that are those of another card.
    """

    name: str
    source: str
    capability: tuple[int, int]
    sms: int
    peak_tflops: float
    nvlink_gbs: float
    nic_gbs: float
    gpus_per_node: int
    connections: int = field(default=_ASKED_FOR, kw_only=True)
    nic_us: float
    host_exchange_us: float = field(default=_HOST_EXCHANGE_US, kw_only=True)
    sum_sm_gbs: float
    tile_tflops: float
    burst_tflops: float
    sustained_tflops: float
    settle_us: float
    small_tile: float
    portable: float
    memory_gbs: float
    torch_copy: float
    copy_gbs: float
    push_us: float
    store_gbs: float
    tile_store_gbs: float
    peer_tile_us: float
    nccl_us: float
    nccl_pair_gbs: float
    nccl_ring_gbs: float
    nccl_beside: float
    gap_us: float
    wait_us: float
    ramp_us: float
    host_call_us: float
    measured: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def not_measured(self) -> tuple[str, ...]:
        """The speeds that were not measured on this machine."""
        return tuple(name for name in SPEEDS if name not in self.measured)

    @property
    def network_not_measured(self) -> tuple[str, ...]:
        """The figures of the network that were not measured on this machine. They count for groups that span nodes."""
        return tuple(name for name in NETWORK_SPEEDS if name not in self.measured)


_FIRST_SPEED = "tile_tflops"  # of the fields; before it are facts
_NAMES = [field.name for field in fields(System)]
SPEEDS = tuple(_NAMES[_NAMES.index(_FIRST_SPEED) : _NAMES.index("measured")])
NETWORK_SPEEDS = ("nic_gbs", "nic_us", "host_exchange_us", "sum_sm_gbs")

H200 = System(
    "h200", "NVIDIA H200 SXM data sheet; measured in benchmarks/h200x2 and h200x4", (9, 0), 132, 989.4, 450.0, 50.0, 8,
    nic_us=14.0, sum_sm_gbs=60.0,
    tile_tflops=850.0, burst_tflops=755.0, sustained_tflops=655.0, settle_us=490.0, small_tile=0.88, portable=0.83,
    memory_gbs=SUM_GBS, torch_copy=0.42, copy_gbs=360.0, push_us=6.2, store_gbs=240.0, tile_store_gbs=330.0, peer_tile_us=11.0,
    nccl_us=19.0, nccl_pair_gbs=220.0, nccl_ring_gbs=285.0, nccl_beside=0.5, gap_us=1.5, wait_us=2.0, ramp_us=10.0,
    host_call_us=4.0, measured=SPEEDS,
)  # fmt: skip
# nic_us: of a ring's hop over the network in NCCL's own model (src/graph/tuning.cc). sum_sm_gbs: 4 and 8 blocks on 4 to 8 SMs of
# an H100 (kernels/add_blocks.py); of 2 blocks an SM adds twice as much.
_H200_MEMORY_GBS = 4800.0  # data sheet


@dataclass(frozen=True)
class Sheet:
    """What a data sheet says. power_limited: long products run below what the SMs could do, as on H200."""

    source: str
    capability: tuple[int, int]
    sms: int
    peak_tflops: float
    memory_gbs: float
    nvlink_gbs: float
    nic_gbs: float
    power_limited: bool = True


SHEETS = {
    "a100": Sheet("NVIDIA A100 80GB SXM data sheet", (8, 0), 108, 312.0, 2039.0, 300.0, 25.0),
    "h100": Sheet("NVIDIA H100 SXM data sheet", (9, 0), 132, 989.4, 3350.0, 450.0, 50.0),
    "h800": Sheet(
        "NVIDIA H100 SXM data sheet; links as in the evaluation of the Ditron paper", (9, 0), 132, 989.4, 3350.0, 200.0, 50.0
    ),
    "h20": Sheet(
        "figures that resellers of the H20 publish; links as in the evaluation of the Ditron paper",
        (9, 0), 78, 148.0, 4000.0, 450.0, 25.0, power_limited=False,
    ),
    "b200": Sheet("NVIDIA DGX B200 data sheet", (10, 0), 148, 2250.0, 8000.0, 900.0, 50.0),
}  # fmt: skip


def scaled(name: str, sheet: Sheet) -> System:
    """The H200's figures in proportion to a data sheet's: rates to peak, copies to NVLink, sums to memory; NCCL as said above."""
    compute, link = sheet.peak_tflops / H200.peak_tflops, sheet.nvlink_gbs / H200.nvlink_gbs
    tile = H200.tile_tflops * compute
    copies, nccl = H200.copy_gbs * link, max(1.0, link)
    return replace(
        H200, name=name, source=sheet.source, capability=sheet.capability, sms=sheet.sms, peak_tflops=sheet.peak_tflops,
        connections=_ASKED_FOR if sheet.capability < _BLACKWELL else _OF_CUDA,
        nvlink_gbs=sheet.nvlink_gbs, nic_gbs=sheet.nic_gbs, tile_tflops=tile,
        burst_tflops=H200.burst_tflops * compute if sheet.power_limited else tile,
        sustained_tflops=H200.sustained_tflops * compute if sheet.power_limited else tile,
        memory_gbs=H200.memory_gbs * sheet.memory_gbs / _H200_MEMORY_GBS, copy_gbs=copies,
        store_gbs=H200.store_gbs * link, tile_store_gbs=H200.tile_store_gbs * link, peer_tile_us=H200.peer_tile_us / link,
        nccl_pair_gbs=min(H200.nccl_pair_gbs * nccl, copies), nccl_ring_gbs=min(H200.nccl_ring_gbs * nccl, copies), measured=(),
    )  # fmt: skip


SYSTEMS: Mapping[str, System] = {"h200": H200, **{name: scaled(name, sheet) for name, sheet in SHEETS.items()}}

# The cards whose facts these are, by the names that CUDA reports. Others of the same family have other SMs, clocks and links.
CARDS: Mapping[str, str] = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H800": "h800",
    "NVIDIA H20": "h20",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}
