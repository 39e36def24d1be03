"""The plan of a call: everything that the first call with some shapes decides, once, for all later ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..config import OverlapConfig, flag_name
from ..group.memory import Request
from ..schedule.inter_node import Crossing, crossings
from ..schedule.order import A2A_GEMM, GATHER, GEMM_A2A, INBOUND, SCATTER, Topology, sources
from ..schedule.transfers import Legs, legs
from ..select.choose import Choice, alone, choose
from ..select.low_latency import LOW_LATENCY, flagged_bytes, refusal
from ..select.method import CHUNK_COUNTS, Method
from ..select.passes import SCATTER_AND_WGRAD, Pass
from ..select.table import Table
from ..select.tiles import chunks_of
from ..select.tiling import (
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
from .spec import OperatorSpec, shapes_of

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

    @cached_property
    def receives(self) -> bool:
        """Whether the rank multiplies what it receives, and not what it sends."""
        return self.kind in INBOUND

    @cached_property
    def slots(self) -> int:
        return 0 if self.method == "collective" else 1

    @cached_property
    def spared_sms(self) -> int:
        """SMs that products leave alone, so that nothing starves another."""
        return self.send_sms + self.reduce_sms + self.wait_sms + self.other_sms

    def beside(self, sms: int) -> EnginePlan:
        """The same, beside what another group sends, which holds so many SMs."""
        return replace(self, other_sms=sms)

    @cached_property
    def reduces_later(self) -> bool:
        """Whether a kernel of its own adds a scatter's partials. Across nodes they are sums of nodes, which come last."""
        return self.variant.split_reduction or self.nodes > 1

    @cached_property
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


@dataclass(frozen=True)
class Plan:
    """The passes of one operator.

    dgrad_alone: the input gradient where no weight gradient is wanted: nothing of it is held back. wgrad: how the weight
    gradient's operand is sent again; None where it need not be.
    """

    spec: OperatorSpec
    config: OverlapConfig
    fprop: EnginePlan
    dgrad: EnginePlan
    dgrad_alone: EnginePlan
    wgrad: EnginePlan | None
    request: Request
    dtype: torch.dtype

    @property
    def crosses(self) -> bool:
        """Whether a pass sends between nodes."""
        return any(engine.nodes > 1 and engine.slots for engine in (self.fprop, self.dgrad))


def make_plan(
    spec: OperatorSpec, config: OverlapConfig, table: Table, topology: Topology, x: torch.Tensor, w: torch.Tensor,
    device: torch.device | None = None, network_gbs: float = 0.0,
) -> Plan:  # fmt: skip
    """The plan of `spec` for operands like x and w, of any shape: what is wrong with them is found by `spec.error`. device: where
    it runs; None: where x is. network_gbs: what the network between the nodes carries, the same on all ranks; 0: unknown."""
    device = device or x.device
    rows, (n, k) = spec.global_rows(x, topology.world), (w.shape[:1].numel(), w.shape[-1:].numel())
    first = Pass(spec.fprop, rows, n, k, x.dtype, topology.world)
    network = network_of(config, network_gbs)
    sends_again = spec.sends_input and config.gathered_input == "regather"
    if spec.multiplies:
        second = first.dgrad
        forward, backward = (choose(config.method, p, device, table, topology.nodes) for p in (first, second))
        pushes_again = sends_again and forward.method != "collective"
        if spec.sends_input and not pushes_again:  # it would collide with nothing
            backward = backward.by(barrier_first=False)
        fprop = engine_plan(forward, first, topology, device, w, network)
        dgrad = dgrad_alone = engine_plan(backward, second, topology, device, w, network)
        if (by_itself := alone(backward, second, device)) != backward:
            dgrad_alone = engine_plan(by_itself, second, topology, device, w, network)
        dgrad = replace(dgrad, beside_wgrad=dgrad.kind not in INBOUND)
    else:
        fprop = dgrad = dgrad_alone = _exchange(first, config, topology, device, w, network)
    wgrad = sent_again(fprop, topology) if sends_again else None
    request = _request(spec, config, x, w, topology.world, (fprop, dgrad, wgrad))
    return Plan(spec, config, fprop, dgrad, dgrad_alone, wgrad, request, x.dtype)


def _request(
    spec: OperatorSpec, config: OverlapConfig, x: torch.Tensor, w: torch.Tensor, world: int,
    engines: tuple[EnginePlan, EnginePlan, EnginePlan | None],
) -> Request:  # fmt: skip
    """What ranks compare, and the memory that a slot needs. engines: of forward, backward, and of what is sent again."""
    fprop, dgrad, _ = engines
    how = f"method {fprop.variant} forward and {dgrad.variant} backward, gathered_input={config.gathered_input}"
    received = spec.slot_bytes(x, w, world)
    methods = {engine.method for engine in engines if engine is not None}
    return Request(
        spec.name,
        shapes_of(x, w),
        how,
        slot_bytes=received if methods - {"collective", LOW_LATENCY} else 0,
        flagged_bytes=flagged_bytes(received, world) if LOW_LATENCY in methods else 0,
    )


def _exchange(
    pass_: Pass, config: OverlapConfig, topology: Topology, device: torch.device, w: torch.Tensor, network: NodeNetwork
) -> EnginePlan:
    """An exchange alone. Beside it runs a product of another group, whose kernel may hold its SMs to its end: waits
    need one (engine_plan.py: _wait_sms)."""
    engine = engine_plan(_without_product(config, topology), pass_, topology, device, w, network)
    return replace(engine, wait_sms=int(topology.nodes > 1 and device.type == "cuda" and engine.slots > 0))


def network_of(config: OverlapConfig, network_gbs: float) -> NodeNetwork:
    return NodeNetwork(config.network_sms, config.reduce_sms, network_gbs)


def _without_product(config: OverlapConfig, topology: Topology) -> Choice:
    """How an exchange alone runs: by the copy engine, which leaves the SMs to the product of another group beside it."""
    across = topology.nodes > 1 and config.method == "auto"
    if config.method == "collective" or across:
        unmeasured = "auto: not tuned: all-to-alls beside a product across nodes are not measured"
        return Choice(Method("collective"), unmeasured if across else "asked for")
    # Across nodes in one chunk: nothing multiplies a chunk while the next one comes.
    return Choice(Method("chunked", chunks=int(topology.nodes > 1)), "beside a product")


def barrier_first(plan: Plan, gathers: bool) -> bool:
    """Whether the backward pass starts with a barrier. gathers: x is sent again in it."""
    return plan.dgrad.variant.barrier_first and (gathers or not plan.spec.sends_input)


def why_not(plan: Plan, device: torch.device, interpreted: Callable[[], bool]) -> str | None:
    """Why the plan's kernels cannot run on a device, or None. interpreted: kernels run in Triton's interpreter."""
    for engine in (plan.fprop, plan.dgrad):
        if engine.method == LOW_LATENCY:
            refused = refusal(plan.spec.name, engine.kind, plan.request.flagged_bytes)
            if refused is not None:
                return refused
        if device.type == "cuda" or not Method(engine.method).kernels:
            continue
        if not interpreted():
            return (
                f"method={engine.method!r} with CPU tensors: its kernels run there in Triton's interpreter only, which "
                "is for tests "
                f"(TRITON_INTERPRET=1 before the first import); use 'auto' or 'chunked' ({flag_name('method')})"
            )
        if Method(engine.method).multiplies and plan.dtype == torch.bfloat16:
            return (
                f"method={engine.method!r} with bfloat16 CPU tensors: Triton's interpreter multiplies their bit "
                "patterns; use float32, "
                f"float16, or method 'chunked' ({flag_name('method')})"
            )
    return None


def why_not_across_nodes(plan: Plan, topology_problem: str | None) -> str | None:
    """Why the plan's engines cannot run in a group whose nodes are as they are, or None. topology_problem: of all that share
    memory."""
    sharing = [engine for engine in (plan.fprop, plan.dgrad) if engine.slots]
    for engine in sharing:
        if topology_problem is not None:
            return topology_problem
        if engine.nodes > 1 and not Method(engine.method).crosses:
            return (
                f"method={engine.method!r} in a group of {engine.nodes} nodes: its kernels send inside one node only; use "
                f"'auto', 'fused', 'chunked' or 'collective', or a group inside one node ({flag_name('method')})"
            )
    return None


def why_not_together(exchange: Plan, product: Plan, nodes: tuple[int, int]) -> str | None:
    """Why an all-to-all cannot run beside the product of another group (TP x Ulysses), or None; the same on all ranks of both.

    nodes: how many the two groups span, the worst answer of any rank (ulysses/groups.py: nodes_of_groups). The methods asked for
    decide, and no engine: those of two TP groups may differ, where one spans nodes and the other does not.
    """
    if min(nodes) == 1 or exchange.config.method in ("auto", "collective") or product.config.method == "collective":
        return None
    return (
        f"group and tp_group span {nodes[0]} and {nodes[1]} nodes: two groups of GPUs do not overlap across nodes together yet; "
        f"use 'auto' or 'collective', or a tp_group inside one node ({flag_name('method')})"
    )
