"""The overlap domain of a process group: its heap, slots and copy engine, and how its ranks reach each other (`OneNode`; across
several nodes: nodes/). And the scope around each of its operators.

All state that outlives a call hangs here. registry.py knows the domains of this process.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from ..cache import BoundedCache
from ..config import OverlapConfig
from ..gpu.driver import CudaDriver
from ..gpu.launch import LaunchCache, Launcher
from ..kernels.signal_words import FAULT_SET
from ..ranks.agreement import Agreement
from ..schedule.order import Topology
from ..symmetric import SymmetricHeap, heap_by, resolve_provider
from .collective_calls import CollectiveCalls, collective_calls
from .copy_engine import CopyEngine, HostCopyEngine, StreamCopyEngine
from .signals import FaultRecord, Tag
from .slots import Layout
from .topology import Nodes, find_nodes
from .waits import BoundedWaits
from .workspace import Workspace

OUTSIDE: AbstractContextManager[Any] = nullcontext()
# In C, where torch has CUDA.
_is_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled


def profiled(name: str) -> AbstractContextManager[Any]:
    """The range overlap_train/<name>, as in overlap_train/fc1/fprop, while torch.profiler or emit_nvtx is on. Half a microsecond
    otherwise."""
    return torch.profiler.record_function(f"overlap_train/{name}") if is_profiling() else OUTSIDE


def _another_thread(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name}: another thread of this process is in an operator of the same group; the ranks' calls of a "
        f"group need one order: call from one thread, or give each thread a group of its own"
    )


class OperatorScope:
    """The scope that OverlapDomain.operator returns. A linear keeps its scope, and enters it in each call."""

    def __init__(self, domain: OverlapDomain, tag: Tag, slots: int, barrier_first: bool, shown_as: str) -> None:
        self._domain, self._tag, self._slots, self._barrier_first = domain, tag, slots, barrier_first
        self._shown_as, self._range = shown_as, OUTSIDE
        domain.fault.register(tag)

    def __enter__(self) -> None:
        domain, slots, fault = self._domain, self._slots, self._domain.fault
        if domain.closed or (slots and (domain.heap is None or (domain.on_gpu and _is_capturing()))):
            domain.check_usable(self._tag, slots)
        if fault.error is not None or fault.words[FAULT_SET]:
            fault.check()
        if not domain.in_use.acquire(False):
            raise _another_thread(self._tag.op)
        fault.begun += 1
        try:
            if domain.agreement.peers.takes_back:
                domain.agreement.peers.go_on()
            domain.engine.begin()
            if slots:
                domain.workspace.begin(self._tag, slots, self._barrier_first)
            if self._shown_as and is_profiling():
                self._range = profiled(self._shown_as)
                self._range.__enter__()
        except BaseException as error:
            self.__exit__(None, error)
            raise

    def __exit__(self, _: object, raised: BaseException | None, *__: object) -> None:
        domain, fault = self._domain, self._domain.fault
        if self._range is not OUTSIDE:
            self._range, ended = OUTSIDE, self._range
            ended.__exit__(None, None, None)
        try:
            domain.engine.join()  # whatever was raised: pushes must not outlive the operator, the next one resets their counters
            if raised is not None and self._slots:
                if domain.workspace.use.is_ahead:
                    domain.engine.join()
                domain.workspace.use.invalidate()
        finally:
            domain.in_use.release()
            if raised is not None:
                fault.tell(raised, self._tag.op)
        if raised is None and (fault.error is not None or fault.words[FAULT_SET]):
            fault.check()


class OneNode:
    """A group whose ranks map each other's memory.

    staged_blocks: blocks of symmetric memory that a rank holds beside its slots, to send from. graphs: whether CUDA graphs may
    hold its slots.
    """

    staged_blocks = 0
    graphs = True

    def __init__(self, domain: OverlapDomain) -> None:
        self.domain = domain

    def provider(self) -> str:
        """The name of the provider of the group's symmetric memory. ValueError: it cannot serve the group."""
        domain = self.domain
        return resolve_provider(domain.group, domain.config.provider, domain.device)

    def new_memory(self, layout: Layout) -> tuple[SymmetricHeap, Workspace]:
        """A new heap and its slots. Peers may send into it as soon as this returns. Collective."""
        domain = self.domain
        heap = heap_by(self.provider(), domain.agreement, layout.nbytes, domain.device)
        waits = BoundedWaits(domain.rank, domain.world_size, domain.config.timeout_s, domain.fault, domain.launcher)
        return heap, Workspace(heap, layout, domain.device, waits)

    def barrier_before_growth(self) -> None:
        """What an operator that raised has sent comes before the heap is replaced: inside a node it has."""

    def products_beside(self, started: Any) -> AbstractContextManager[None]:
        """Scope of library products that leave SMs to what a pass of the plan `started` sends and adds meanwhile; None: nothing
        is under way. Engines have one around their own products."""
        return OUTSIDE


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
        self.graphed = False  # inside registry.graphed
        self.captured = False  # a CUDA graph holds addresses of the heap
        self.at_close: list[Callable[[], object]] = []
        self.in_use = threading.RLock()  # an operator is under way, or ranks agree on one
        self.agreement = Agreement(group, config.timeout_s)  # last: a rank whose domain could not be made has none
        self.fault.agreement, self.agreement.is_idle = self.agreement, lambda: self.engine.is_idle()
        self.agreement.peers.begun = lambda: self.fault.begun

    @cached_property
    def launches(self) -> LaunchCache:
        """Of kernels that touch nothing that is shared."""
        return LaunchCache(self.launcher, 0)

    @cached_property
    def main_grad_addresses(self) -> BoundedCache[tuple[int, ...], torch.Tensor]:
        """Where main_grad of each expert lies, by these addresses; on the device (ops/grouped_wgrad.py)."""
        return BoundedCache()

    @cached_property
    def places_of_weights(self) -> BoundedCache[tuple[int, ...], torch.Tensor]:
        """Where each expert's weight begins, by these numbers; on the device (ops/launch_experts.py)."""
        return BoundedCache()

    @cached_property
    def nodes(self) -> Nodes:
        """The nodes of the group. Collective where `find_nodes` has not found them yet."""
        return self.find_nodes("overlap_train: find the nodes of the group")

    def find_nodes(self, what: str) -> Nodes:
        """Find the nodes, unless a call has. Collective then. what: what the ranks do here, for errors."""
        if "nodes" not in vars(self):
            self.nodes = find_nodes(self.agreement, self.device, self.config, what)
        return self.nodes

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
        """Raise RuntimeError if the symmetric memory is gone, or if the operator is captured into a CUDA graph, across nodes or
        outside `graphed`, so that no barriers would be around its replays."""
        if self.closed or (slots and self.heap is None):
            raise RuntimeError(
                f"{tag.op}: the symmetric memory of its group is gone, by shutdown(), or is another process's, from which this "
                f"one was forked; a backward belongs before shutdown(), and operators into the rank"
            )
        if not slots or not self.is_capturing():
            return
        if not self.span.graphs:
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

    def operator(self, tag: Tag, slots: int, barrier_first: bool = False, shown_as: str = "") -> OperatorScope:
        """The scope of one autograd pass of an operator. It may be kept, and entered again and again.

        Calls from several streams run in the order of their scopes. At its end the scope joins all pushes; then their sources
        may be freed. slots: how many gathers and scatters the pass makes by way of symmetric memory, at most. It waits for each
        of them. barrier_first: whether the pass starts with a barrier. shown_as: the name of its range in profiles.

        Raises:
            RuntimeError: see check_usable; or another thread is in an operator of the same group.
            OverlapTimeoutError, OverlapMismatchError: a wait has failed, in an earlier pass or in this one. The scope does not
                wait for the device to find that out.
        """
        return OperatorScope(self, tag, slots, barrier_first, shown_as)

    def begin_ahead(self) -> None:
        """Begin the next operator, which makes one call, before the running one has read, or pulled, what it receives.

        The running one has sent all by copies, or pulls: what a kernel is yet to send would come after what the next one sends.
        """
        self.engine.begin_ahead()
        self.workspace.begin_ahead()

    @contextmanager
    def exclusively(self, name: str) -> Iterator[None]:
        """A scope that one thread of this process may be in at a time: the ranks' calls of a group need one order. Else it raises
        RuntimeError."""
        if not self.in_use.acquire(False):
            raise _another_thread(name)
        try:
            yield
        except BaseException as error:
            self.fault.tell(error, name, begun=False)
            raise
        finally:
            self.in_use.release()

    @cached_property
    def span(self) -> OneNode:
        """How the ranks reach each other. Collective at its first use: it finds the nodes."""
        if self.topology.nodes == 1:
            return OneNode(self)
        make: Callable[[OverlapDomain], OneNode] = import_module("...nodes", __name__).SeveralNodes
        return make(self)

    def take_memory(self, heap: SymmetricHeap, workspace: Workspace, layout: Layout) -> None:
        """Let calls use a new heap and its slots, in place of those before, which are closed."""
        self._close_heap()
        self.heap, self.layout, self.workspace = heap, layout, workspace

    def _close_heap(self) -> None:
        """Unmap the heap at once. torch's heap waits for the device when it is freed. Later that could happen between the launch
        of a kernel and its pushes (copy_engine.py)."""
        if self.heap is None:
            return
        del self.workspace  # it holds views of the heap,
        gc.collect()  # in objects that refer to each other: only the collector frees them
        self.heap.close()
        self.heap = None

    def close(self) -> None:
        """End the engine and give the symmetric memory back. Collective over the group. Nothing runs in this domain any more."""
        self.closed = True
        for forget in self.at_close:
            forget()
        self.fault.looks.clear()  # they refer to it: without them its thread ends with it
        self.engine.close()
        self.agreement.forget()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        self.agreement.peers.leave()
        if self.heap is not None and self.on_gpu:  # nobody still pushes into memory that is unmapped next
            self.agreement.barrier("overlap_train: shutdown", closing=True)
        self._close_heap()


def barrier(domain: OverlapDomain, tag: Tag) -> None:
    """Hold all ranks' streams until every rank has come here. Afterwards all slots are free."""
    with domain.operator(tag, slots=0):
        domain.workspace.barrier(tag)
