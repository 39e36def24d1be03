"""The slots of a group that spans nodes, how its ranks wait, and how they meet."""

from __future__ import annotations

import torch

from ..planning.schedule import Topology
from ..symmetric import SymmetricHeap
from ..symmetric.inter_node import Transport
from .layout import Layout
from .node_slot import NodeCall, NodeSlot
from .slot import Call, Slot
from .waits import BoundedWaits, next_epoch_on_host
from .watchdog import FaultRecord
from .workspace import Workspace

_NOTHING = torch.empty(0, dtype=torch.uint8)


class NodeWaits(BoundedWaits):
    """Waits end, too, when one of another thread of this rank has failed."""

    def __init__(self, topology: Topology, timeout_s: float, fault: FaultRecord, network: Transport) -> None:
        super().__init__(topology.rank, topology.world, timeout_s, fault, None)
        self.topology, self._network = topology, network
        self.barrier = self.barrier_in_two_steps

    def _is_over(self) -> bool:
        return self._fault.failed

    def _wait_for_word(self, call: Call, source: int, chunk: int) -> None:
        super()._wait_for_word(call, source, chunk)
        self._fault.check()

    def barrier_in_two_steps(self, call: Call) -> None:
        """The twins meet, then the ranks of each node: who hears from a rank of the own node knows that its twins are here."""
        assert isinstance(call, NodeCall)
        topology = self.topology
        next_epoch_on_host(call)
        twins = [topology.twin(node) for node in range(topology.nodes) if node != topology.node]
        for twin in twins:
            self._network.put(_NOTHING, call.place_of(twin, self.rank, 0), call.word)
        for twin in twins:
            self.on_host(call, twin, 1)
        beside = [rank for rank in topology.ranks_of(topology.node) if rank != self.rank]
        for rank in beside:
            call.slot.words[rank][self.rank, :1].copy_(call.slot.epoch)
        for rank in beside:
            self.on_host(call, rank, 1)


class NodeWorkspace(Workspace):
    """See Workspace."""

    _waits: NodeWaits

    def _slot(self, heap: SymmetricHeap, layout: Layout, index: int, device: torch.device) -> Slot:
        return NodeSlot(heap, layout, index, self._waits.topology, device)

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
