"""The slots of a group that spans nodes, how its ranks wait, and how they meet."""

from __future__ import annotations

import torch

from ..gpu.launch import Launcher
from ..planning.schedule.topology import Topology
from ..symmetric import SymmetricHeap
from .layout import Layout
from .node_engine import NodeEngine
from .node_slot import NodeCall, NodeSlot
from .node_streams import NodeStreamEngine
from .slot import Call, Slot
from .waits import BoundedWaits
from .watchdog import FaultRecord
from .workspace import Workspace


class NodeWaits(BoundedWaits):
    """Waits on the host end, too, when one of another thread of this rank has failed."""

    def __init__(
        self, topology: Topology, timeout_s: float, fault: FaultRecord, engine: NodeEngine | NodeStreamEngine,
        launcher: Launcher | None,
    ) -> None:  # fmt: skip
        super().__init__(topology.rank, topology.world, timeout_s, fault, launcher)
        self.topology, self._engine = topology, engine
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
        call.next_epoch()
        self._engine.barrier(call, topology)
        for node in range(topology.nodes):
            if node != topology.node:
                self.wait(call, topology.twin(node), 1)
        beside = [rank for rank in topology.ranks_of(topology.node) if rank != self.rank]
        for rank in beside:
            call.slot.words[rank][self.rank, :1].copy_(call.slot.epoch)
        for rank in beside:
            self.wait(call, rank, 1)


class NodeWorkspace(Workspace):
    """The Workspace of a group that spans nodes: slots and calls are NodeSlot and NodeCall."""

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
