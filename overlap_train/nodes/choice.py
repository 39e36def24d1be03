"""The choice of a method across nodes: which may be chosen, into how many chunks blocks are cut, what a pass takes."""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from ..select.cost import Estimate, Work, library_us, sum_us
from ..select.method import CHUNK_COUNTS, Method
from ..select.passes import Pass
from ..select.reach import Reach
from ..select.sm_budget import MOST_SMS
from ..select.system import System
from ..select.tiles import chunks_of, sent_bytes
from ..select.tiling import network_chunk_count, pays_in_short_chunks, products_that_fill

# Raised whenever the schedule between nodes becomes another one. Tables of one node stay.
CROSSINGS = 1


class AcrossNodes(Reach):
    """A group of `nodes` nodes, as many ranks on each."""

    has_rules = False  # into how many chunks blocks are cut depends on the network, on CPUs, too

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def may_choose(self, method: str) -> bool:
        return Method(method).crosses

    def key_fields(self, device: torch.device, network: str) -> dict[str, Any]:
        found: dict[str, Any] = {"nodes": self.nodes, "crossings": CROSSINGS}
        if device.type == "cuda":
            queues = "one" if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" else "many"
            found |= {"network": "nvshmem" if network == "nvshmem" else "nccl", "queues": queues}
        return found

    def collective_us(self, pass_: Pass, system: System) -> float:
        """An all-gather or reduce-scatter is a flat ring, as in NCCL's own model (src/graph/tuning.cc): its slowest link says how
        fast. The rings of a node leave it by all NICs of its ranks. An all-to-all sends to far ranks over each rank's own NIC.
        """
        world, local, nbytes = pass_.world, pass_.world // self.nodes, sent_bytes(pass_)
        if pass_.kind.exchanges:
            far = (world - local) / (world - 1) * nbytes / (system.nic_gbs * 1e3) + system.nic_us
            return system.nccl_us + max((local - 1) / (world - 1) * nbytes / (system.nccl_ring_gbs * 1e3), far)
        inside = math.inf if local == 1 else system.nccl_pair_gbs if local == 2 else system.nccl_ring_gbs
        hops = (self.nodes - 1) * system.nic_us
        return system.nccl_us + hops + nbytes / (min(inside, local * system.nic_gbs) * 1e3)

    def estimate(self, pass_: Pass, how: Method, system: System, backward: bool = False) -> Estimate:
        """What crosses the network is the slowest of all, or the GEMM is, which leaves some SMs to it. Partial sums cross as sums
        of a node."""
        one, local = Work(pass_, how, system), pass_.world // self.nodes
        again = backward and not one.kind.receives
        wgrad = library_us(system, pass_.k, pass_.n, pass_.rows, sm_margin=MOST_SMS) if backward else 0.0
        if how.name == "collective":
            rounds = 2 if again and one.kind.reduces else 1
            device = rounds * self.collective_us(pass_, system) + one.gemm_us + one.put_together() + wgrad
            return Estimate(device + 3 * system.gap_us, one.host_us(backward))
        chunks = network_chunks_of(how, pass_, system, self.nodes, system.nic_gbs)
        parts = chunks * (self.nodes if how.multiplies or local == 1 else pass_.world)
        exchanges = (self.nodes - 1) * (local if one.kind.exchanges else 1)
        network = exchanges * (one.block_bytes / (system.nic_gbs * 1e3) + chunks * system.nic_us)
        copies = (local - 1) * self.nodes * one.push_us(1)  # what arrives is passed on, or partials are collected
        sums = sum_us(system, (local + self.nodes) * one.block_bytes) if one.kind.reduces else 0.0
        gemm = _gemm_us(one, chunks)
        device = max(gemm, network + gemm / parts, copies + gemm / parts) + sums + system.nic_us + 2 * system.gap_us
        if backward:
            device = max(device + wgrad, (1 + again) * network + sums)
        return Estimate(device, one.host_us(backward) + (1 + again) * exchanges * chunks * system.host_exchange_us)


def _gemm_us(one: Work, chunks: int) -> float:
    """The GEMM beside the network: one kernel's, or the library's, chunk by chunk."""
    p = one.pass_
    if one.how.multiplies:
        return library_us(one.system, p.rows, p.n, p.k, sm_margin=MOST_SMS)
    columns = p.n // (p.world if one.kind.splits_columns else 1)
    depth = p.k // (p.world if one.kind.sums_blocks else 1)
    count = p.world * chunks
    return count * library_us(one.system, p.m // count, columns, depth, count, MOST_SMS)


def network_chunks_of(how: Method, pass_: Pass, device: System | torch.device, nodes: int, gbs: float) -> int:
    """Into how many chunks each block is cut between nodes: as measured, else as a rule says. gbs: of the network; 0: unknown."""
    system, local = System.of(device), pass_.world // nodes
    if how.chunks or system.type != "cuda" or not how.pushes:
        return chunks_of(how, pass_, system)
    row_bytes, m_shard = pass_.row_features * pass_.dtype.itemsize, max(1, pass_.m // pass_.world)
    # One is multiplied while the next is on its way.
    return network_chunk_count(
        m_shard, row_bytes, _most_products(how, pass_, local, system.sms), pays_in_short_chunks(local, gbs)
    )


def _most_products(how: Method, pass_: Pass, local: int, sms: int) -> int:
    """Into how many products at most a method may cut what crosses between nodes of `local` GPUs."""
    if how.multiplies and not pass_.kind.receives and local == 1:
        return CHUNK_COUNTS[-1]  # no limit: one launch goes on from chunk to chunk
    # One launch of the kernel of a gather multiplies a chunk of all ranks of a node.
    at_once = local if how.multiplies and pass_.kind.gathers else 1
    columns = pass_.n // (pass_.world if pass_.kind.splits_columns else 1)
    return products_that_fill(max(1, pass_.m // pass_.world), columns, at_once, sms)
