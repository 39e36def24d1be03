"""How the ranks of a group that spans nodes reach each other: its engine, its heap, how they wait, and their barrier."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from ..config import flag_name
from ..gpu.driver import Blas
from ..gpu.launch import Launcher
from ..group.domain import OneNode, barrier
from ..group.signals import FaultRecord, Tag
from ..group.slots import BARRIER, Call, Layout, Slot
from ..group.waits import BoundedWaits
from ..group.workspace import Workspace
from ..ops.plan import EnginePlan
from ..schedule.order import Topology
from ..symmetric import SymmetricHeap, heap_by, resolve_provider
from .engines import InterNodeEngine, StreamEngine
from .gloo import GlooTransport, HostEngine
from .nccl import NcclTransport
from .nvshmem import NvshmemPuts
from .plan import sms_of_network
from .slots import NodeCall, NodeSlot


class NodeWaits(BoundedWaits):
    """The BoundedWaits of a group that spans nodes."""

    def __init__(
        self, topology: Topology, timeout_s: float, fault: FaultRecord, engine: InterNodeEngine,
        launcher: Launcher | None,
    ) -> None:  # fmt: skip
        super().__init__(topology.rank, topology.world, timeout_s, fault, launcher)
        self.topology, self._engine, self.barrier = topology, engine, self.barrier_in_two_steps

    def barrier_in_two_steps(self, call: Call) -> None:
        """Of rail peers, then of the ranks of each node: who hears from one of these knows that its rail peers are here."""
        assert isinstance(call, NodeCall)
        topology = self.topology
        call.next_epoch()
        self._engine.barrier(call, topology)
        for node in range(topology.nodes):
            if node != topology.node:
                self.wait(call, topology.rail_peer(node), 1)
        beside = [rank for rank in topology.ranks_of(topology.node) if rank != self.rank]
        for rank in beside:
            call.slot.words[rank][self.rank, :1].copy_(call.slot.epoch)
        for rank in beside:
            self.wait(call, rank, 1)


class NodeWorkspace(Workspace):
    """The Workspace of a group that spans nodes: slots and calls are NodeSlot and NodeCall."""

    _waits: NodeWaits

    def _new_slots(self, heap: SymmetricHeap, layout: Layout, device: torch.device) -> list[Slot]:
        return [NodeSlot(heap, layout, index, self._waits.topology, device) for index in range(BARRIER + 1)]

    def _new_call(self, slot: Slot, block_shape: torch.Size, dtype: torch.dtype, chunks: int) -> Call:
        assert isinstance(slot, NodeSlot)
        return NodeCall(self._waits, slot, block_shape, dtype, chunks)


def link_of(topology: Topology, block: int) -> str:
    """How block `block` of a slot comes to this rank, for errors."""
    sender, node = topology.sender(block), block // topology.local
    if sender == block and node != topology.node:
        return f" (of node {node}, over the network to this node {topology.node}, which may be down)"
    if sender == block:
        return f" (of this node {node}, over shared memory)"
    return (
        f" (of node {node}, by way of rank {sender} of this node {topology.node}; the network between them may be down)"
    )


class SeveralNodes(OneNode):
    """A group that spans nodes: an engine carries data between them, and ranks map the memory of their own node."""

    graphs = False  # the host watches exchanges

    @property
    def by_nvshmem(self) -> bool:
        """Whether NVSHMEM carries data between the nodes."""
        return self.domain.on_gpu and self.domain.config.network == "nvshmem"

    @property
    def staged_blocks(self) -> int:  # type: ignore[override]
        return int(self.by_nvshmem)

    def products_beside(self, started: EnginePlan | None) -> AbstractContextManager[None]:
        engine = self.domain.engine
        if started is None or not started.slots or not started.sm_margin:
            return nullcontext()
        assert isinstance(engine, InterNodeEngine)
        return engine.products(started.sm_margin)

    def provider(self) -> str:
        domain, topology = self.domain, self.domain.topology
        node = None if self.by_nvshmem else topology.ranks_of(topology.node)
        provider = resolve_provider(domain.group, domain.config.provider, domain.device, node)
        if self.by_nvshmem and provider != "nvshmem":
            raise ValueError(
                f"network='nvshmem' with symmetric memory of {provider}: it needs NVSHMEM's for the whole group; install "
                f"nvshmem4py, leave NVSHMEM's one world to this group, or use network='nccl' ({flag_name('network')})"
            )
        return provider

    def engine(self) -> InterNodeEngine:
        """The engine that carries data between the nodes. Its first use makes it and connects the nodes; collective."""
        domain = self.domain
        if isinstance(domain.engine, InterNodeEngine):
            return domain.engine
        engine = self._new_engine()
        domain.engine.close()
        domain.engine, domain.fault.link_of = engine, partial(link_of, domain.topology)
        return engine

    def _new_engine(self) -> InterNodeEngine:
        domain, topology, config = self.domain, self.domain.topology, self.domain.config
        agreement, device, fault = domain.agreement, domain.device, domain.fault
        if domain.launcher is None:
            return HostEngine(config.timeout_s, GlooTransport(agreement, topology, config.timeout_s, fault), fault)
        driver = domain.launcher.driver
        network: NvshmemPuts | NcclTransport = NvshmemPuts(driver)
        if not self.by_nvshmem:
            network = NcclTransport(
                agreement, topology, device, config.timeout_s, fault, sms_of_network(config, device)
            )
        return StreamEngine(device, driver, network, fault, Blas(device))

    def new_memory(self, layout: Layout) -> tuple[SymmetricHeap, Workspace]:
        domain, topology, engine = self.domain, self.domain.topology, self.engine()
        node = topology.ranks_of(topology.node)
        nbytes = layout.nbytes + self.staged_blocks * layout.block_bytes
        heap = heap_by(self.provider(), domain.agreement, nbytes, domain.device, node, self.by_nvshmem)
        if isinstance(engine, HostEngine):
            engine.network.attach({rank: heap.view(rank) for rank in node})
        elif self.by_nvshmem:
            engine.network.attach(heap.view(topology.rank), layout.nbytes)
        domain.agreement.barrier("overlap_train: grow symmetric memory")  # every rank receives into the new heap now
        waits = NodeWaits(topology, domain.config.timeout_s, domain.fault, engine, domain.launcher)
        return heap, NodeWorkspace(heap, layout, domain.device, waits)

    def barrier_before_growth(self) -> None:
        """Nobody has waited for what an operator that raised has sent. It comes before the words of this barrier; else it could
        come into the new heap, as if a call there had sent it."""
        barrier(self.domain, Tag("overlap_train/grow", "barrier"))
