"""What a domain needs if its group spans nodes: an engine that carries data between them, and a heap with slots for it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from ..config import OverlapConfig, flag_name
from ..gpu.blas import Blas
from ..gpu.launch import Launcher
from ..planning.schedule.topology import Topology
from ..protocol.layout import Layout
from ..protocol.node_engine import NodeEngine
from ..protocol.node_networks import NodeExchangeEngine, NodePutEngine
from ..protocol.node_streams import NodeStreamEngine
from ..protocol.node_workspace import NodeWaits, NodeWorkspace
from ..protocol.watchdog import FaultRecord
from ..protocol.workspace import Workspace
from ..select.sm_budget import SmBudget, in_words
from ..symmetric import SymmetricHeap, open_heap, resolve_provider
from ..symmetric.agreement import Agreement, say_on_rank_0
from ..symmetric.gloo import GlooTransport
from ..symmetric.nccl import NcclTransport
from ..symmetric.node_sums import settle
from ..symmetric.puts import PUT_GBS, NvshmemPuts
from ..symmetric.wire import connect


@dataclass(frozen=True)
class AcrossNodes:
    """Makes what one domain needs if its group spans nodes. launcher: None on CPUs."""

    config: OverlapConfig
    device: torch.device
    topology: Topology
    agreement: Agreement
    fault: FaultRecord
    launcher: Launcher | None

    @property
    def by_nvshmem(self) -> bool:
        """Whether NVSHMEM carries data between the nodes."""
        return self.launcher is not None and self.topology.nodes > 1 and self.config.network == "nvshmem"

    @property
    def staged_blocks(self) -> int:
        """How many blocks of symmetric memory a rank holds beside its slots, to send from."""
        return int(self.by_nvshmem)

    def provider(self) -> str:
        """The name of the provider of the domain's symmetric memory.

        Raises:
            ValueError: it cannot serve the group, or carry data between its nodes.
        """
        config, topology = self.config, self.topology
        node = None if self.by_nvshmem or topology.nodes == 1 else topology.ranks_of(topology.node)
        provider = resolve_provider(self.agreement.group, config.provider, self.device, node)
        if self.by_nvshmem and provider != "nvshmem":
            raise ValueError(
                f"network='nvshmem' with symmetric memory of {provider}: it needs NVSHMEM's for the whole group; install "
                f"nvshmem4py, leave NVSHMEM's one world to this group, or use network='nccl' ({flag_name('network')})"
            )
        return provider

    def new_engine(self) -> NodeEngine | NodeStreamEngine:
        """A new engine that carries data between the nodes, connected with the peers. Collective."""
        agreement, topology, timeout_s, launcher = self.agreement, self.topology, self.config.timeout_s, self.launcher
        if launcher is None:
            return NodeEngine(timeout_s, GlooTransport(agreement, topology, timeout_s), self.fault)
        if self.by_nvshmem:
            device, driver = self.device, launcher.driver
            sms = self._settled(PUT_GBS, 0)
            return NodePutEngine(device, driver, NvshmemPuts(driver), self.fault, Blas(device), sms)
        return self._new_exchanges(launcher)

    def _new_exchanges(self, launcher: Launcher) -> NodeExchangeEngine:
        agreement, topology, device, config, fault = self.agreement, self.topology, self.device, self.config, self.fault
        by = partial(NcclTransport, agreement, topology, device, config.timeout_s, fault)
        nccl, gbs = connect(agreement, topology, device, self._budget, by, fault)
        with ExitStack() as opened:  # what fails leaves no communicator open, and no thread that watches it
            opened.callback(nccl.close, orderly=False)
            sms = self._settled(gbs, nccl.sms)
            engine = NodeExchangeEngine(device, launcher.driver, nccl, fault, Blas(device), sms, gbs)
            opened.pop_all()
        return engine

    @property
    def _budget(self) -> SmBudget:
        return SmBudget(self.topology.local, self.config.network_sms, self.config.reduce_sms)

    def _settled(self, wire_gbs: float, network: int) -> int:
        """The SMs of the sum of a node, beside NCCL's `network`. Collective. Rank 0 prints what all communication holds."""
        asked, most = self.config.reduce_sms, self._budget.for_sums(network)
        sms = settle(self.agreement, self.topology, self.device, wire_gbs, asked, most)
        say_on_rank_0(self.agreement.rank, in_words(network, sms if self.topology.local > 1 else 0))
        return sms

    def new_memory(self, layout: Layout, engine: NodeEngine | NodeStreamEngine) -> tuple[SymmetricHeap, Workspace]:
        """A new heap and its slots. Peers may send into it as soon as this returns. Collective."""
        topology, device = self.topology, self.device
        node = topology.ranks_of(topology.node)
        nbytes = layout.nbytes + self.staged_blocks * layout.block_bytes
        heap = open_heap(self.agreement, nbytes, self.config.provider, device, node, carries=self.by_nvshmem)
        if isinstance(engine, NodeEngine):
            engine.network.attach({rank: heap.view(rank) for rank in node})
        elif isinstance(engine, NodePutEngine):
            engine.network.attach(heap.view(topology.rank), layout.nbytes)
        self.agreement.barrier("overlap_train: grow symmetric memory")  # every rank receives into the new heap now
        waits = NodeWaits(topology, self.config.timeout_s, self.fault, engine, self.launcher)
        return heap, NodeWorkspace(heap, layout, device, waits)
