"""The overlap domain of a process group: its heap, slots and copy engine. All state that outlives a call hangs here.

registry.py knows the domains of this process.
"""

from __future__ import annotations

import gc
from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .config import OverlapConfig, flag_name
from .driver import CudaDriver
from .protocol.copy_engine import CopyEngine, HostCopyEngine, StreamCopyEngine
from .protocol.layout import SLOTS, Layout
from .protocol.waits import BoundedWaits
from .protocol.watchdog import FaultRecord
from .protocol.workspace import Workspace
from .symmetric import SymmetricHeap, open_heap, resolve_provider
from .tuned.table import agreed

_MIB = 1 << 20


@dataclass(frozen=True)
class Demand:
    """What one operator call, forward and backward, asks of the domain. Ranks must agree on it.

    slot_bytes: of what its gather receives, which is as large as what its scatter receives.
    """

    op: str
    shapes: str
    slot_bytes: int


class OverlapDomain:
    """The ranks that exchange chunks with each other, and what they share. Made by `domain_of`, by all ranks together."""

    workspace: Workspace

    @torch.inference_mode(False)  # what outlives a call is written to by calls outside of it, too
    def __init__(self, group: dist.ProcessGroup, config: OverlapConfig, device: torch.device) -> None:
        self.group, self.config, self.device = group, config, device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._on_gpu = device.type == "cuda"
        self._driver = CudaDriver(device) if self._on_gpu else None
        self.engine: CopyEngine = (
            HostCopyEngine(config.timeout_s) if self._driver is None else StreamCopyEngine(device, self._driver)
        )
        self.fault = FaultRecord(device)
        self.layout = Layout(self.world_size, 0)
        self.heap: SymmetricHeap | None = None
        self.table = agreed(group, config.tuning_dir, device)  # what method=auto goes by, the same on all ranks
        self.graphed = False  # inside graph.graphed
        self.captured = False  # a CUDA graph holds addresses of the heap
        self.plans: dict[Hashable, Any] = {}  # what linear.py has decided, by shapes and settings
        self._agreed: set[Demand] = set()

    def prepare(self, demand: Demand, problem: str | None) -> None:
        """Make sure that every rank asks for the same and that the heap holds it. Communicates only the first time.

        Args:
            problem: what is wrong with this rank's arguments, or None.

        Raises:
            ValueError: on every rank, if any rank has a problem, the ranks ask for different things, or it does not fit.
            RuntimeError: it is new, and a CUDA graph is being captured.
        """
        if demand in self._agreed:
            if problem is None:
                return
            raise ValueError(problem)  # peers whose arguments are right may be in the operator already: they time out
        if self.is_capturing():
            raise RuntimeError(
                f"{demand.op} with {demand.shapes} is new to its group, and a CUDA graph is being captured, in which ranks can "
                f"neither agree nor compile; run what is captured twice before capturing it"
            )
        terms, unmet = self._terms()
        replies: list[tuple[str | None, Demand, str]] = [(None, demand, terms)] * self.world_size
        dist.all_gather_object(replies, (problem or unmet, demand, terms), group=self.group)
        self._compare(demand, terms, replies)
        self._hold(demand)
        self._agreed.add(demand)

    def _compare(self, demand: Demand, terms: str, replies: list[tuple[str | None, Demand, str]]) -> None:
        """replies: of each rank its problem, its demand and its terms. Raises ValueError as `prepare` says."""
        for rank, (reported, _, _) in enumerate(replies):
            if reported is not None:
                raise ValueError(reported if rank == self.rank else f"{reported} (on rank {rank} of the group)")
        for rank, (_, theirs, their_terms) in enumerate(replies):
            if theirs != demand:
                raise ValueError(
                    f"{demand.op}: this rank has {demand.shapes}, rank {rank} of the group has {theirs.op}: {theirs.shapes}; "
                    f"all ranks of a group must call the same operator with the same shapes and dtype"
                )
            if their_terms != terms:
                raise ValueError(
                    f"{demand.op}: this rank has {terms}, rank {rank} of the group has {their_terms}; all ranks of a group "
                    f"need the same OverlapConfig, and nvshmem4py installed on all or none"
                )

    def _terms(self) -> tuple[str, str | None]:
        """What symmetric memory needs to be equal everywhere, in words; and why this rank cannot have it, or None."""
        limits = f"symmetric_mib={self.config.symmetric_mib}, timeout_s={self.config.timeout_s:g}"
        try:
            return f"provider={resolve_provider(self.group, self.config.provider, self.device)}, {limits}", None
        except ValueError as error:
            return limits, str(error)

    def _hold(self, demand: Demand) -> None:
        layout = self.layout.covering(demand.slot_bytes)
        if self.heap is not None and layout == self.layout:
            return
        if self.captured:
            raise ValueError(
                f"{demand.op} with {demand.shapes} needs more symmetric memory, but a CUDA graph holds addresses of what is "
                f"there; run the largest shapes before capturing, or free the graph, call overlap_train.forget_graphs(group) on "
                f"all ranks and capture again"
            )
        if layout.nbytes > self.config.symmetric_mib * _MIB:
            raise ValueError(
                f"symmetric_mib={self.config.symmetric_mib} is too small: {demand.op} with {demand.shapes} needs "
                f"{-(-layout.nbytes // _MIB)} MiB of symmetric memory per rank ({SLOTS} slots of "
                f"{layout.slot_bytes / _MIB:.1f} MiB); raise OverlapConfig.symmetric_mib ({flag_name('symmetric_mib')})"
            )
        self._reallocate(layout)

    @torch.inference_mode(False)
    def _reallocate(self, layout: Layout) -> None:
        """Replace the heap by a larger one. Collective, and outside the hot path: once for each larger shape.

        Nothing counts as agreed before it is there. Where that fails, the next call of whatever shape asks for memory again.
        """
        if self._on_gpu:
            torch.cuda.synchronize(self.device)
        dist.barrier(self.group)  # nobody is still pushing into the old heap
        agreed, plans = self._agreed.copy(), self.plans.copy()
        self._agreed.clear()
        self.plans.clear()
        self.layout = Layout(self.world_size, 0)
        self._close_heap()
        self.heap = open_heap(self.group, layout.nbytes, self.config.provider, self.device)
        self.layout = layout
        waits = BoundedWaits(self.rank, self.world_size, self.config.timeout_s, self.fault, self._driver)
        self.workspace = Workspace(self.heap, layout, self.device, waits)
        meet(self, "overlap_train/open")  # so that the kernel is loaded: where a graph is captured it could not be
        self._agreed |= agreed
        self.plans |= plans

    def _close_heap(self) -> None:
        """Unmap what was there, now: torch's heap waits for the device when it goes, which later could be between the launch of a
        kernel and its pushes (copy_engine.py)."""
        if self.heap is None:
            return
        self.__dict__.pop("workspace", None)  # it holds views of it; where opening failed there is none
        gc.collect()  # in objects that know each other, so that only the collector ends them
        self.heap.close()
        self.heap = None

    def operator(self, name: str, calls: int, in_step: bool = False) -> AbstractContextManager[None]:
        """Bracket of everything that one autograd pass of one operator does here: up to so many gathers and scatters, each waited
        for before the end. in_step: the ranks meet first. name: what a time-out of that says.

        Raises an earlier time-out before and, without waiting for the device, after. Calls from several streams are put in
        order. Pushes are joined at the end, so that their sources may be freed.

        Raises:
            RuntimeError: it is captured into a CUDA graph whose replays would not be between barriers, or the symmetric memory is
                gone.
        """
        if self.heap is None:
            raise RuntimeError(
                f"{name}: the symmetric memory of its group is gone, by shutdown() or because more of it could not be had; a "
                f"backward belongs before shutdown()"
            )
        if not self.graphed and self.is_capturing():
            raise RuntimeError(
                "an operator was called while a CUDA graph is captured, but not inside overlap_train.graphed(group), without "
                "which replays and eager calls overwrite each other's data; capture inside it (of Megatron's own graphs only "
                "those of the full iteration are), or train without CUDA graphs"
            )
        return _Operator(self, name, calls, in_step)

    def is_capturing(self) -> bool:
        """Whether what the caller's stream is given goes into a CUDA graph."""
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def close(self) -> None:
        self.engine.close()
        if self._on_gpu:
            torch.cuda.synchronize(self.device)
            dist.barrier(self.group)  # nobody is still pushing into memory that is about to be unmapped
        self._close_heap()


def meet(domain: OverlapDomain, op: str) -> None:
    """All ranks' streams meet; all slots are free."""
    with domain.operator(op, calls=0):
        domain.workspace.barrier(op)


class _Operator:
    """OverlapDomain.operator; not a generator, which would take 2 microseconds more."""

    def __init__(self, domain: OverlapDomain, name: str, calls: int, in_step: bool) -> None:
        self._domain, self._name, self._calls, self._in_step = domain, name, calls, in_step

    def __enter__(self) -> None:
        domain = self._domain
        domain.fault.check()
        domain.engine.begin()
        try:
            domain.workspace.begin(self._name, self._calls, self._in_step)
        except BaseException:
            self.__exit__(True)
            raise

    def __exit__(self, raised: object, *_: object) -> None:
        domain = self._domain
        domain.engine.join()  # whatever was raised, pushes must not outlive the operator: the next call resets their counters
        if raised is None:
            domain.fault.check()
        else:
            domain.workspace.use.doubt()
