"""The overlap domain of a process group: its heap, slots and copy engine. All state that outlives a call hangs here.

registry.py knows the domains of this process. bracket.py is around each operator. prepare.py makes room for what is new.
"""

from __future__ import annotations

import gc
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial

import torch
import torch.distributed as dist

from ..config import OverlapConfig
from ..gpu.driver import CudaDriver
from ..gpu.launch import Launcher
from ..planning.schedule.topology import Topology
from ..protocol.collective_calls import CollectiveCalls, collective_calls
from ..protocol.copy_engine import CopyEngine
from ..protocol.copy_stream import StreamCopyEngine
from ..protocol.copy_thread import HostCopyEngine
from ..protocol.layout import Layout
from ..protocol.node_engine import NodeEngine
from ..protocol.node_streams import NodeStreamEngine
from ..protocol.node_workspace import link_of
from ..protocol.tags import Tag
from ..protocol.watchdog import FaultRecord
from ..protocol.workspace import Workspace
from ..symmetric import SymmetricHeap
from ..symmetric.agreement import Agreement
from ..symmetric.topology import Nodes, NodeSettings, find_nodes
from .across_nodes import AcrossNodes
from .bracket import Exclusively, Operator


class OverlapDomain:
    """The ranks that exchange chunks with each other, and what they share. Made by `domain_of`, by all ranks together."""

    workspace: Workspace

    @torch.inference_mode(False)  # what outlives a call is written to by calls outside of it, too
    def __init__(self, group: dist.ProcessGroup, config: OverlapConfig, device: torch.device) -> None:
        self.group, self.config, self.device = group, config, device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.on_gpu = device.type == "cuda"
        self.launcher = Launcher(CudaDriver(device)) if self.on_gpu else None
        self.engine: CopyEngine = (
            HostCopyEngine(config.timeout_s)
            if self.launcher is None
            else StreamCopyEngine(device, self.launcher.driver)
        )
        self.fault = FaultRecord(device, self.rank, config.timeout_s)
        self.layout = Layout(self.world_size, 0)
        self.heap: SymmetricHeap | None = None
        self.closed = False
        self.graphed = False  # inside graph.graphed
        self.captured = False  # a CUDA graph holds addresses of the heap
        self.book: object | None = None  # kept for a layer above: a PlanBook (operators/plan_book.py)
        self.in_use = threading.RLock()  # an operator is under way, or ranks agree on one
        self.agreement = Agreement(group, config.timeout_s)  # last: a rank whose domain could not be made has none

    @cached_property
    def nodes(self) -> Nodes:
        """The nodes of the group. Collective at its first use: where the group's plans begin, before any memory is shared."""
        config = self.config
        settings = NodeSettings(config.node_ranks, config.network, config.network_sms, config.reduce_sms)
        return find_nodes(self.agreement, self.device, settings)

    @property
    def topology(self) -> Topology:
        """The nodes of the group, as this rank sees them."""
        return self.nodes.topology

    @cached_property
    def collective_calls(self) -> CollectiveCalls:
        """What each call of a collective enters. Collective at its first use."""
        return collective_calls(self.agreement, self.fault, self.device)

    def is_capturing(self) -> bool:
        """Whether the caller's stream is being captured into a CUDA graph."""
        return self.on_gpu and torch.cuda.is_current_stream_capturing()

    def check_usable(self, tag: Tag, slots: int) -> None:
        """Check that an operator can run here now.

        Raises:
            RuntimeError: the symmetric memory is gone; or the operator is captured into a CUDA graph, across nodes or outside
                `graphed`, so that no barriers would be around its replays.
        """
        if self.closed or (slots and self.heap is None):
            raise RuntimeError(
                f"{tag.op}: the symmetric memory of its group is gone, by shutdown(); a backward belongs before shutdown()"
            )
        if not slots or not self.is_capturing():
            return
        if self.topology.nodes > 1:
            raise RuntimeError(
                f"{tag.op}: a CUDA graph is being captured in a group that spans nodes, whose exchanges the host has to watch; "
                f"train without CUDA graphs, or use method='collective'"
            )
        if not self.graphed:
            raise RuntimeError(
                "an operator was called while a CUDA graph is captured, but not inside overlap_train.graphed(group), without "
                "which replays and eager calls overwrite each other's data; capture inside it (of Megatron's own graphs only "
                "those of the full iteration are), or train without CUDA graphs"
            )

    def operator(self, tag: Tag, slots: int, barrier_first: bool = False, shown_as: str = "") -> Operator:
        """The bracket of one autograd pass of an operator. It may be kept, and entered again and again.

        Calls from several streams run in the order of their brackets. At its end the bracket joins all pushes; then their sources
        may be freed.

        Args:
            slots: how many gathers and scatters the pass makes by way of symmetric memory, at most. It waits for each of them.
            barrier_first: whether the pass starts with a barrier.
            shown_as: the name of its range in profiles.

        Raises:
            RuntimeError: see check_usable; or another thread is in an operator of the same group.
            OverlapTimeoutError, OverlapMismatchError: a wait has failed, in an earlier pass or in this one. The bracket does not
                wait for the device to find that out.
        """
        return Operator(self, tag, slots, barrier_first, shown_as)

    def begin_ahead(self) -> None:
        """Begin the next operator before the running one has read, or pulled, what it receives. The next one's bracket follows.

        The next operator makes one call. The running one has sent everything by copies, or its ranks have met in a barrier and
        pull. (What a kernel is yet to send would come after what the next operator sends.)
        """
        self.engine.begin_ahead()
        self.workspace.begin_ahead()

    def exclusively(self, name: str) -> AbstractContextManager[None]:
        """A bracket that one thread of this process may be in at a time: the ranks' calls of a group need one order.

        Raises:
            RuntimeError: another thread is in an operator of this group.
        """
        return Exclusively(self.in_use, name)

    @property
    def is_connected(self) -> bool:
        """Whether the nodes of the group are connected."""
        return isinstance(self.engine, NodeEngine | NodeStreamEngine)

    @property
    def network_gbs(self) -> float:
        """GB/s that the network between the nodes carries in each direction, the same on all ranks. Measured where NCCL connects
        them (`settled`); 0: not measured."""
        return self.engine.gbs if isinstance(self.engine, NodeStreamEngine) else 0.0

    def settled(self, config: OverlapConfig) -> OverlapConfig:
        """`config` with the network_sms and reduce_sms of the connected nodes, which are measured if the config says 0.

        On CPUs, inside one node and, before the nodes are connected, during a capture it is `config` itself. Collective at its
        first use: it connects the nodes.
        """
        if not self.on_gpu or self.topology.nodes == 1 or (self.is_capturing() and not self.is_connected):
            return config
        engine = self.engine_across_nodes()
        assert isinstance(engine, NodeStreamEngine)
        return replace(config, network_sms=engine.network.sms, reduce_sms=engine.reduce_sms)

    def engine_across_nodes(self) -> NodeEngine | NodeStreamEngine:
        """The engine that carries data between the nodes. Its first use makes it and connects the nodes; collective."""
        if isinstance(self.engine, NodeEngine | NodeStreamEngine):
            return self.engine
        engine = self.across_nodes.new_engine()
        self.engine.close()
        self.engine, self.fault.link_of = engine, partial(link_of, self.topology)
        return engine

    @cached_property
    def across_nodes(self) -> AcrossNodes:
        """Makes what the group needs if it spans nodes."""
        return AcrossNodes(self.config, self.device, self.topology, self.agreement, self.fault, self.launcher)

    def take_memory(self, heap: SymmetricHeap, workspace: Workspace, layout: Layout) -> None:
        """Let calls use a new heap and its slots, in place of those before, which are closed."""
        self._close_heap()
        self.heap, self.layout, self.workspace = heap, layout, workspace

    def _close_heap(self) -> None:
        """Unmap the heap at once. torch's heap waits for the device when it is freed. Later that could happen between the launch
        of a kernel and its pushes (copy_stream.py)."""
        if self.heap is None:
            return
        del self.workspace  # it holds views of the heap,
        gc.collect()  # in objects that refer to each other: only the collector frees them
        self.heap.close()
        self.heap = None

    def close(self) -> None:
        """End the engine and give the symmetric memory back. Collective over the group. Nothing runs in this domain any more."""
        self.closed = True
        self.fault.looks.clear()  # they refer to it: without them its thread ends with it
        self.engine.close()
        self.agreement.forget()
        if self.heap is not None and self.on_gpu:
            torch.cuda.synchronize(self.device)
            self.agreement.barrier("overlap_train: shutdown")  # nobody still pushes into memory that is unmapped next
        self._close_heap()


def barrier(domain: OverlapDomain, tag: Tag) -> None:
    """Hold all ranks' streams until every rank has come here. Afterwards all slots are free."""
    with domain.operator(tag, slots=0):
        domain.workspace.barrier(tag)
