"""The choice of a method across nodes, what a pass takes, and its plan: chunks, exchanges, and the SMs that products leave to the
network."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from ..config import OverlapConfig, flag_name
from ..ops.plan import EnginePlan, Planner
from ..schedule.inter_node import SendRecv, send_recvs
from ..select.choose import Choice
from ..select.cost import Estimate, Reach, by_nccl_us, host_us, in_parts_us, library_us, sum_us
from ..select.method import CHUNK_COUNTS, Method, Pass
from ..select.system import System
from ..select.tiles import HOPPER_TILE, SHORTEST_COPY, chunk_count, chunks_of

# The SMs that communication between nodes of GPUs may hold where settings do not say. With 16 of 132 fewer a product takes 14 %
# longer at most. NCCL sends with half of its own while it receives with the others. Nothing crosses faster than its sum is made,
# for which seven SMs of an H100 read and write 400 GB/s.
NETWORK_SMS, REDUCE_SMS, WAIT_SMS = 8, 7, 1
MOST_SMS = NETWORK_SMS + REDUCE_SMS + WAIT_SMS
_MOST_CHUNKS = 4
# Raised whenever the schedule between nodes becomes another one. Tables of one node stay.
CROSSINGS = 1


class AcrossNodes(Reach):
    """A group of `nodes` nodes, as many ranks on each."""

    has_rules = False  # how many chunks a block is cut into is measured, or network_chunks_of says it

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
        fast. The rings of a node leave it by all NICs of its ranks, an all-to-all by each rank's own."""
        world, local, nbytes = pass_.world, pass_.world // self.nodes, pass_.sent_bytes
        if pass_.kind.exchanges:
            far = (world - local) / (world - 1) * nbytes / (system.nic_gbs * 1e3) + system.nic_us
            return system.nccl_us + max((local - 1) / (world - 1) * nbytes / (system.nccl_ring_gbs * 1e3), far)
        inside = math.inf if local == 1 else system.nccl_pair_gbs if local == 2 else system.nccl_ring_gbs
        hops = (self.nodes - 1) * system.nic_us
        return system.nccl_us + hops + nbytes / (min(inside, local * system.nic_gbs) * 1e3)

    def estimate(self, pass_: Pass, how: Method, system: System, backward: bool = False) -> Estimate:
        """What crosses the network is the slowest of all, or the GEMM is. Partial sums cross as sums of a node."""
        kind, local = pass_.kind.engine, pass_.world // self.nodes
        again = backward and not kind.receives
        wgrad = library_us(system, pass_.k, pass_.n, pass_.rows, MOST_SMS) if backward else 0.0
        host = host_us(pass_, how, system, backward)
        if how.name == "collective":
            rounds = 2 if again and kind.reduces else 1
            return Estimate(by_nccl_us(pass_, system, rounds * self.collective_us(pass_, system)) + wgrad, host)
        block_bytes = pass_.sent_bytes / (pass_.world - 1)
        chunks = network_chunks_of(how, pass_, system, self.nodes)
        parts = chunks * (self.nodes if how.multiplies or local == 1 else pass_.world)
        exchanges = (self.nodes - 1) * (local if kind.exchanges else 1)
        network = exchanges * (block_bytes / (system.nic_gbs * 1e3) + chunks * system.nic_us)
        # What arrives is passed on, or partials are collected.
        copies = (local - 1) * self.nodes * (block_bytes / (system.copy_gbs * 1e3) + system.push_us)
        sums = sum_us(system, (local + self.nodes) * block_bytes) if kind.reduces else 0.0
        gemm = library_us(system, pass_.rows, pass_.n, pass_.k, MOST_SMS)
        if not how.multiplies:
            gemm = in_parts_us(pass_, system, chunks, MOST_SMS)
        device = max(gemm, network + gemm / parts, copies + gemm / parts) + sums + system.nic_us + 2 * system.gap_us
        if backward:
            device = max(device + wgrad, (1 + again) * network + sums)
        return Estimate(device, host + (1 + again) * exchanges * chunks * system.host_exchange_us)


def network_chunks_of(how: Method, pass_: Pass, device: System | torch.device, nodes: int) -> int:
    """Into how many chunks each block is cut between nodes: as measured, else as a rule says."""
    system, local = System.of(device), pass_.world // nodes
    if how.chunks or system.type != "cuda" or not how.pushes:
        return chunks_of(how, pass_, system)
    row_bytes, m_shard = pass_.row_bytes, max(1, pass_.m // pass_.world)
    # One is multiplied while the next is on its way.
    products = _most_products(how, pass_, local, system.sms)
    return chunk_count(m_shard, row_bytes, True, max(1, min(_MOST_CHUNKS, products)), SHORTEST_COPY)


def _most_products(how: Method, pass_: Pass, local: int, sms: int) -> int:
    """Into how many products at most a method may cut what crosses, so that the tiles of each fill the SMs of a GPU."""
    if how.multiplies and not pass_.kind.receives and local == 1:
        return CHUNK_COUNTS[-1]  # no limit: one launch goes on from chunk to chunk
    # One launch of the kernel of a gather multiplies a chunk of all ranks of a node.
    at_once = local if how.multiplies and pass_.kind.gathers else 1
    columns = pass_.n // (pass_.world if pass_.kind.splits_columns else 1)
    return at_once * HOPPER_TILE.count(max(1, pass_.m // pass_.world), columns) // sms


@dataclass(frozen=True, eq=False)
class InterNodePlan(EnginePlan):
    """One pass in a group of `nodes` nodes. send_sms, reduce_sms, wait_sms: the SMs of NCCL, sums, and waits of one CTA."""

    nodes: int = 1
    send_recvs: tuple[SendRecv, ...] = ()
    send_sms: int = 0
    reduce_sms: int = 0
    wait_sms: int = 0

    reach = "nodes"

    @cached_property
    def sm_margin(self) -> int:
        return self.send_sms + self.reduce_sms + self.wait_sms + self.concurrent_sms

    @cached_property
    def reduces_later(self) -> bool:
        """What a scatter adds last are sums of nodes, which a kernel of its own adds."""
        return True

    @property
    def error(self) -> str | None:
        if not self.slots or self.variant.crosses:
            return None
        return (
            f"method={self.method!r} in a group of {self.nodes} nodes: its kernels send inside one node only; use "
            f"'auto', 'fused', 'chunked' or 'collective', or a group inside one node ({flag_name('method')})"
        )


def sms_of_network(config: OverlapConfig, device: torch.device) -> int:
    """The SMs that the network between nodes may hold. On CPUs settings have no meaning, and hold as they are."""
    if config.network == "nvshmem" or device.type != "cuda":
        return config.network_sms
    return config.network_sms or NETWORK_SMS


def sms_of_sums(config: OverlapConfig, device: torch.device) -> int:
    """Those that the sum of a node's partials may hold."""
    return config.reduce_sms or REDUCE_SMS * (device.type == "cuda")


class InterNodePlanner(Planner):
    """The Planner of groups that span nodes."""

    def chunks(self, how: Method, pass_: Pass, device: torch.device) -> int:
        return network_chunks_of(how, pass_, device, self.topology.nodes)

    def plan(self, choice: Choice, pass_: Pass, device: torch.device, w: torch.Tensor) -> InterNodePlan:
        plan, topology = super().plan(choice, pass_, device, w), self.topology
        tiled = plan.method == "fused"
        found = self._across(plan, send_recvs(plan.kind, topology, plan.chunks, tiled))
        if device.type != "cuda":
            return found
        config, is_nccl = self.config, plan.method == "collective"
        adds = plan.kind.reduces and topology.local > 1 and not is_nccl
        return replace(
            found,
            # The products of `collective` run before or after its NCCL, or beside a communicator whose SMs are not known here.
            send_sms=0 if is_nccl else sms_of_network(config, device),
            reduce_sms=sms_of_sums(config, device) if adds else 0,
            # A persistent kernel holds its SMs to its end. Meanwhile kernels of one CTA (wait_kernel) let something arrive or be
            # added: a few at once, which fit on one SM.
            wait_sms=WAIT_SMS * plan.variant.multiplies,
        )

    def sent_again(self, fprop: EnginePlan) -> InterNodePlan:
        assert isinstance(fprop, InterNodePlan)
        exchanges = send_recvs(fprop.kind, self.topology, chunks=1)
        return replace(self._across(super().sent_again(fprop), exchanges), send_sms=fprop.send_sms)

    def exchange(self, pass_: Pass, device: torch.device, w: torch.Tensor) -> EnginePlan:
        """Beside it runs a product of another group, whose kernel may hold its SMs to its end: waits need one."""
        engine = super().exchange(pass_, device, w)
        return replace(engine, wait_sms=int(device.type == "cuda" and engine.slots > 0))  # type: ignore[call-arg]

    def without_product(self) -> Choice:
        if self.config.method == "auto":
            unmeasured = "auto: not tuned: all-to-alls beside a product across nodes are not measured"
            return Choice(Method("collective"), unmeasured)
        choice = super().without_product()
        # In one chunk: nothing multiplies a chunk while the next one comes.
        return choice if choice.method == "collective" else choice.by(chunks=1)

    def _across(self, plan: EnginePlan, exchanges: tuple[SendRecv, ...]) -> InterNodePlan:
        return InterNodePlan(
            **{part.name: getattr(plan, part.name) for part in fields(plan)},
            nodes=self.topology.nodes,
            send_recvs=exchanges,
        )
