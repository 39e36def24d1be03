"""How one pass of an operator runs: which engine, by which kernels, in which chunks, on how many SMs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..select.choose import Choice
from ..select.method import CHUNK_COUNTS, Method
from ..select.tiles import chunks_of
from .low_latency import LOW_LATENCY
from .passes import SCATTER_AND_WGRAD, Pass
from .schedule.crossings import Crossing, crossings
from .schedule.kinds import A2A_GEMM, GATHER, GEMM_A2A, INBOUND, SCATTER
from .schedule.legs import Legs, legs
from .schedule.order import sources
from .schedule.topology import Topology
from .tiling import (
    HOPPER,
    HOPPER_TILE,
    LIBRARY,
    PORTABLE,
    TileConfig,
    blocks_together,
    portable_tile,
    tma_reads,
    tma_reads_weight,
)

MOST_DIRECT_PEERS = 7  # peers for which the Hopper kernel of GEMM + RS has a tensor descriptor


@dataclass(frozen=True)
class NodeNetwork:
    """What carries data between nodes of GPUs.

    sms, reduce_sms: that NCCL holds, and the sum of a node's partials (network_sms, reduce_sms of OverlapConfig). gbs: GB/s in
    each direction; 0: not measured.
    """

    sms: int = 0
    reduce_sms: int = 0
    gbs: float = 0.0


@dataclass(frozen=True)
class EnginePlan:
    """One pass: which engine, how it runs, and why.

    kind: of schedule/kinds.py. kernels: HOPPER, PORTABLE or LIBRARY. tile: of those kernels. chunks: of each block. legs: what
    this rank sends. sources: the other ranks in the order in which their blocks arrive. slots: how many it takes of the
    workspace. send_sms, reduce_sms, wait_sms: those that NCCL has between nodes, sums of this node's partials, and waits of
    one CTA; other_sms: those of what another group sends beside it. Products leave all of these. nodes: that the group spans.
    crossings: what goes over the network between them, each with what comes meanwhile. together: blocks that A2A + GEMM
    multiplies at once across nodes of GPUs. by_rows: whether it multiplies some rows of two ranks' blocks at once, side by
    side. beside_wgrad: whether a weight gradient is multiplied while its result leaves.
    """

    kind: str
    method: str
    reason: str
    variant: Method
    kernels: str
    tile: TileConfig
    chunks: int
    legs: Legs
    sources: tuple[int, ...]
    send_sms: int = 0
    reduce_sms: int = 0
    wait_sms: int = 0
    other_sms: int = 0
    nodes: int = 1
    crossings: tuple[Crossing, ...] = ()
    together: int = 1
    by_rows: bool = False
    beside_wgrad: bool = False

    @property
    def slots(self) -> int:
        return 0 if self.method == "collective" else 1

    @cached_property
    def spared_sms(self) -> int:
        """SMs that products leave alone, so that nothing starves another."""
        return self.send_sms + self.reduce_sms + self.wait_sms + self.other_sms

    def beside(self, sms: int) -> EnginePlan:
        """The same, beside what another group sends, which holds so many SMs."""
        return replace(self, other_sms=sms)

    @property
    def reduces_later(self) -> bool:
        """Whether a kernel of its own adds a scatter's partials. Across nodes they are sums of nodes, which come last."""
        return self.variant.split_reduction or self.nodes > 1

    @property
    def hides_copies(self) -> bool:
        """Whether a copy within the GPU, enqueued behind what the plan pushes, is hidden by the plan's kernel. That outlasts its
        pushes, since it waits for the peers', and its last wave of tiles leaves SMs to the copy unless it is full."""
        outlasts = self.kind == GATHER or (self.kind == SCATTER and not self.reduces_later)
        return outlasts and self.method == "fused" and self.nodes == 1

    @property
    def sends_ahead(self) -> bool:
        """Whether copies send an operand, which may leave before the product of the part before it."""
        return self.kind == A2A_GEMM and Method(self.method).pushes

    @property
    def may_pull(self) -> bool:
        """Whether ranks may pull what a product leaves for them, beside the product of the part after it."""
        return self.kind == GEMM_A2A and Method(self.method).pushes and self.nodes == 1


def engine_plan(
    choice: Choice, pass_: Pass, topology: Topology, device: torch.device, w: torch.Tensor, network: NodeNetwork
) -> EnginePlan:
    """How a pass runs by a choice. w: the weight shard, of which its layout counts."""
    kind = SCATTER if pass_.kind == SCATTER_AND_WGRAD else pass_.kind
    chunks = chunks_of(choice.how, pass_, device, topology.nodes, network.gbs)
    if choice.how.chunks:  # these rows may not divide into as many as were measured
        choice = choice.by(chunks=chunks)
    kernels = _kernels(kind, choice, pass_, device, w)
    tile = HOPPER_TILE if kernels == HOPPER else portable_tile(pass_.dtype, device)
    tiled = choice.method == "fused"
    route = legs(kind, topology, chunks, tiled)
    return EnginePlan(
        kind, choice.method, choice.reason, choice.how, kernels, tile, chunks, route, sources(topology, kind),
        send_sms=_send_sms(choice.method, device, topology.nodes, network.sms),
        reduce_sms=_reduce_sms(choice.method, kind, topology, device, network.reduce_sms),
        wait_sms=_wait_sms(choice.method, device, topology.nodes), nodes=topology.nodes,
        crossings=_crossings(kind, topology, chunks, tiled), together=_together(pass_, topology, device),
        by_rows=choice.method == "chunked" and _by_rows(kind, topology, device, chunks),
    )  # fmt: skip


def sent_again(fprop: EnginePlan, topology: Topology) -> EnginePlan:
    """How x is sent again for its weight gradient: in whole blocks by the copy engine, which leaves the SMs to the dgrad
    beside it; chunks would be pushes for nothing. As in the forward pass where that sends by NCCL, or few rows."""
    method = fprop.method if fprop.method in ("collective", LOW_LATENCY) else "chunked"
    route = legs(fprop.kind, topology, chunks=1)
    return EnginePlan(
        fprop.kind, method, "for wgrad", Method(method), LIBRARY, fprop.tile, 1, route, fprop.sources,
        send_sms=fprop.send_sms, nodes=topology.nodes, crossings=_crossings(fprop.kind, topology, chunks=1),
    )  # fmt: skip


def _crossings(kind: str, topology: Topology, chunks: int, tiled: bool = False) -> tuple[Crossing, ...]:
    return crossings(kind, topology, chunks, tiled) if topology.nodes > 1 else ()


def _together(pass_: Pass, topology: Topology, device: torch.device) -> int:
    """Blocks that are multiplied at once."""
    if pass_.kind != A2A_GEMM or topology.nodes == 1 or device.type != "cuda":
        return 1
    return blocks_together(pass_.k // pass_.world, topology.local)


def _by_rows(kind: str, topology: Topology, device: torch.device, chunks: int) -> bool:
    """Whether A2A + GEMM by the library multiplies both ranks' terms of some rows at once, and not rank by rank with the sum in
    fp32.

    Between two H200 as two nodes that took 0.97 to 0.99 of the time of `fused`; rank by rank, on another day, 1.06. With four
    chunks it takes as long, or longer: 3.83 ms instead of 3.82 over 50 GB/s, 6.48 instead of 6.12 over 25 (simulated, 32768 x
    8192 x 8192). With more ranks a chunk waits for several exchanges: 7 and 15 % longer between 3 and 4 nodes of one (simulated,
    one chunk a product).
    """
    two_nodes_of_one = topology.nodes == topology.world == 2
    return kind == A2A_GEMM and two_nodes_of_one and device.type == "cuda" and chunks == CHUNK_COUNTS[-1]


def _send_sms(method: str, device: torch.device, nodes: int, network: int) -> int:
    """NCCL's kernels between nodes wait on SMs for the network; a product that counts on those SMs would wait with them. The
    products of `collective` run before or after its NCCL, or beside a communicator whose SMs are not known here."""
    return network if nodes > 1 and device.type == "cuda" and method != "collective" else 0


def _reduce_sms(method: str, kind: str, topology: Topology, device: torch.device, reduce: int) -> int:
    """Only a scatter adds, and nothing where a node has one rank, or NCCL's own adds."""
    adds = kind == SCATTER and topology.nodes > 1 and topology.local > 1
    return reduce if adds and device.type == "cuda" and method != "collective" else 0


def _wait_sms(method: str, device: torch.device, nodes: int) -> int:
    """A persistent kernel holds its SMs to its end. Meanwhile kernels of one CTA (wait_kernel) let something arrive or be added:
    a few at once, which fit on one SM."""
    return int(nodes > 1 and device.type == "cuda" and Method(method).multiplies)


def _kernels(kind: str, choice: Choice, pass_: Pass, device: torch.device, w: torch.Tensor) -> str:
    if not Method(choice.method).multiplies:
        return LIBRARY
    readable = tma_reads(device, pass_.dtype, pass_.k, pass_.n) and tma_reads(
        device, pass_.dtype, pass_.row_features, 0
    )
    if w.dim() != 2 or not readable or not tma_reads_weight(w):
        return PORTABLE
    too_many = kind not in INBOUND and choice.method == "direct" and pass_.world - 1 > MOST_DIRECT_PEERS
    return PORTABLE if too_many else HOPPER
