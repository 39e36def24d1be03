"""How long each thing takes on a machine: products, sums, collectives. Orders and waits are the simulator's (simulate.py)."""

from __future__ import annotations

import math

from .hardware import NETWORK_CTA_GBS
from .machines import System
from .sm_budget import SmBudget

# Output tiles that a library chooses from: 128 x 256 and the like, and 128 x 128 where larger ones leave SMs idle.
LARGE_TILES, SMALL_TILE = ((128, 256), (256, 128)), (128, 128)

# The low-latency kernel beside its stores: claims, the way to the peers, the poll that sees the words, the last CTA's exit.
# Beside the GEMM 1.05, 2.1, 4.2, 8.4 and 16.8 MB take 21, 24, 40, 75 and 145 us (gathers and scatters, 2 x H200, 6419890);
# by this 15, 24, 41, 76 and 146.
LOW_LATENCY_US = 6.0


def power_us(system: System, flops: float) -> float:
    """What power allows for a product of so many operations: the rate falls from burst_tflops to sustained_tflops."""
    work, us = flops * 1e-6, flops * 1e-6 / system.burst_tflops
    for _ in range(8):  # the rate depends on the time, and the time on the rate
        us = work / _rate(system, us)
    return us


def _rate(system: System, us: float) -> float:
    """TFLOP/s, averaged over a product that takes so long."""
    settle = system.settle_us
    settled = settle / us * -math.expm1(-us / settle)
    return system.sustained_tflops + (system.burst_tflops - system.sustained_tflops) * settled


def tile_at_full_clock_us(system: System, rows: int, cols: int, k: int) -> float:
    """A tile [rows, cols] on one SM, at the highest clock."""
    return 2 * rows * cols * k * system.sms / (system.tile_tflops * 1e6)


def needed_sms(system: System, local: int) -> tuple[int, int]:
    """SMs that are as fast as the NIC in nodes of `local` ranks: (NCCL's, those of the sum of a node).

    NCCL's are, per NETWORK_CTA_GBS, one that sends and one that receives. Groups measure both where they connect their nodes
    (symmetric/wire.py, node_sums.py).
    """
    sums = 0 if local == 1 else math.ceil(node_sum_gbs(local, system.nic_gbs) / system.sum_sm_gbs)
    return 2 * math.ceil(system.nic_gbs / NETWORK_CTA_GBS), sums


def communication_sms(system: System, local: int) -> tuple[int, int]:
    """Those that they get (sm_budget.py)."""
    (network, sums), budget = needed_sms(system, local), SmBudget(local)
    network = min(network, budget.for_network)
    return network, min(sums, budget.for_sums(network))


def node_sum_gbs(local: int, wire_gbs: float) -> float:
    """GB/s that the sum of a node of `local` ranks has to read and write to be as fast as a network of wire_gbs: all partials,
    and the total, for each byte that crosses."""
    return (local + 1) * wire_gbs


def library_gemm_us(
    system: System, m: int, n: int, k: int, parts: int = 1, spared_sms: int = 0, late_waves: int = 0
) -> float:  # fmt: skip
    """One of `parts` library products [m, k] @ [k, n] that run one after the other: waves of tiles, or what power allows.
    spared_sms: that others hold. late_waves: of tiles that found no SM in the waves before."""
    sms = system.sms - spared_sms
    choices = [(rows, cols, 1.0) for rows, cols in LARGE_TILES] + [(*SMALL_TILE, system.small_tile)]
    us, wave_us = min(
        (math.ceil(-(-m // rows) * -(-n // cols) / sms) * wave_us, wave_us)
        for rows, cols, speed in choices
        for wave_us in (tile_at_full_clock_us(system, rows, cols, k) / speed,)
    )
    return max(us + late_waves * wave_us, power_us(system, 2.0 * m * n * k * parts) / parts)


def tile_us(system: System, rows: int, cols: int, k: int, waves: float, allowed_us: float, idle_us: float) -> float:
    """A tile of a persistent kernel that takes `waves` waves for a product of which power allows allowed_us.

    idle_us: for how long each SM does something else meanwhile. What power does not allow the product all the time, the SMs
    get back as a higher clock after they have been idle.
    """
    return max(tile_at_full_clock_us(system, rows, cols, k), (allowed_us - idle_us) / waves)


def sum_us(system: System, nbytes: float, sms: int = 0) -> float:
    """Reading and writing so many bytes of local memory by so many SMs; 0: by all."""
    gbs = min(system.memory_gbs, sms * system.sum_sm_gbs) if sms else system.memory_gbs
    return nbytes / (gbs * 1e3)


def torch_copy_us(system: System, nbytes: float) -> float:
    """Reading and writing so many bytes by a torch operation that moves elements one by one: a copy of blocks that lie apart, or
    rows by an index."""
    return sum_us(system, nbytes) / system.torch_copy


def collective_us(system: System, nbytes: float, world: int, nodes: int = 1) -> float:
    """NCCL's all-gather or reduce-scatter; nbytes: what each rank sends.

    Across nodes it is a flat ring, as in NCCL's own model (src/graph/tuning.cc): its slowest link says how fast. The rings of a
    node leave it by all NICs of its ranks, and what one rank sends crosses over to the next node once for the whole node. A hop
    over the network takes nic_us.
    """
    if world == 1:
        return 0.0
    local = world // nodes
    gbs = [] if local == 1 else [system.nccl_pair_gbs if local == 2 else system.nccl_ring_gbs]
    if nodes > 1:
        gbs.append(local * system.nic_gbs)
    return system.nccl_us + (nodes - 1) * system.nic_us + nbytes / (min(gbs) * 1e3)


def low_latency_us(system: System, nbytes: float) -> float:
    """The low-latency protocol, which sends a flag with every 4 bytes. nbytes: of data, what each rank sends."""
    return LOW_LATENCY_US + 2 * nbytes / (system.store_gbs * 1e3)


def all_to_all_us(system: System, nbytes: float, world: int, nodes: int = 1) -> float:
    """NCCL's all-to-all. With two ranks, too, it is as fast as a ring: 276 to 311 GB/s for 25 to 400 MB (2 x H200).

    Across nodes each rank sends to those of its node over NVLink and to all others over its NIC, both at the same time.
    """
    if world == 1:
        return 0.0
    local = world // nodes
    inside, across = (nbytes * ranks / (world - 1) for ranks in (local - 1, world - local))
    network = system.nic_us + across / (system.nic_gbs * 1e3) if nodes > 1 else 0.0
    return system.nccl_us + max(inside / (system.nccl_ring_gbs * 1e3), network)
