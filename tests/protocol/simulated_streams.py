"""Ranks with simulated GPUs, so that the real `StreamCopyEngine` and the asynchrony of a GPU run under the scheduler.

The host of a rank only enqueues: kernel launches and torch operations go to its current stream (see `simulated_gpu`).
Torch operations are caught by a dispatch mode. One that makes a new tensor runs at once, which gives its shape, and
again in its stream, which gives its values; until then the tensor holds NaN, or zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.protocol.interleaving import Scheduler
from tests.protocol.simulated_gpu import Operation, SimulatedDriver, SimulatedGpu
from tests.protocol.simulated_ranks import SimulatedDomain, Simulation, core


@dataclass(frozen=True)
class StreamSimulation(Simulation):
    """A machine whose ranks have GPUs: asynchronous streams, and waits for chunks in kernels."""

    device_waits: bool = True
    one_queue: bool = False
    gpus: dict[int, SimulatedGpu] = field(default_factory=dict)

    def engine(self, scheduler: Scheduler, rank: int) -> Any:
        """The real engine on a simulated side stream."""
        self.gpus[rank] = gpu = SimulatedGpu(scheduler, rank, self.one_queue)
        with mock.patch.object(torch.cuda, "Stream", gpu.new_stream):
            return core("group.copy_engine").StreamCopyEngine(torch.device("cpu"), SimulatedDriver(gpu))

    def patch(self, scheduler: Scheduler) -> None:
        """As `Simulation.patch`, and host actors enqueue on their rank's current stream."""
        super().patch(scheduler)

        def current_gpu() -> SimulatedGpu:
            return self.gpus[scheduler.running_actor().rank]

        def enqueue_launch(run: Callable[[], None]) -> bool:
            if _is_host(scheduler):
                current_gpu().current.enqueue(Operation("kernel", run))
            return _is_host(scheduler)

        scheduler.during_run(_Enqueueing(scheduler, current_gpu, self.enqueued))
        scheduler.enqueue_launch = enqueue_launch

    def enqueued(self, rank: int, operation: Operation) -> Operation:
        """What a stream gets instead of a torch operation of a rank's host."""
        return operation

    def spawn_hosts(self, scheduler: Scheduler, body: Callable[[SimulatedDomain], None]) -> None:
        """As `Simulation.spawn_hosts`; the rank's streams end once they have run everything."""

        def host(domain: SimulatedDomain) -> None:
            try:
                body(domain)
            finally:
                self.gpus[domain.rank].close()

        for domain in self.ranks(scheduler):
            scheduler.spawn(f"host{domain.rank}", partial(host, domain), rank=domain.rank)


class _Enqueueing(TorchDispatchMode):
    """Sends the torch operations of host actors to their current stream."""

    def __init__(
        self,
        scheduler: Scheduler,
        current_gpu: Callable[[], SimulatedGpu],
        enqueued: Callable[[int, Operation], Operation],
    ) -> None:
        super().__init__()
        self._scheduler, self._current_gpu, self._enqueued = scheduler, current_gpu, enqueued

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not _is_host(self._scheduler) or not any(map(_has_tensor, args)):
            return func(*args, **kwargs)
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads device memory"
        call = partial(func, *args, **kwargs)
        if func._schema.is_mutable:
            self._enqueue(func, call)
            return kwargs.get("out", args[0])
        result = call()
        if not any(returned.alias_info for returned in func._schema.returns):  # not a view
            parts = result if isinstance(result, tuple) else (result,)
            self._enqueue(func, lambda: _fill(parts, call()))
            for part in parts:
                part.fill_(torch.nan if part.is_floating_point() else 0)  # an index that kernels take
        return result

    def _enqueue(self, func: Any, run: Callable[[], object]) -> None:
        gpu = self._current_gpu()
        gpu.current.enqueue(self._enqueued(gpu.rank, Operation(str(func), run)))


def _fill(parts: tuple[torch.Tensor, ...], found: Any) -> None:
    for part, values in zip(parts, found if isinstance(found, tuple) else (found,), strict=True):
        part.copy_(values)


def _has_tensor(arg: Any) -> bool:
    return any(isinstance(item, torch.Tensor) for item in (arg if isinstance(arg, list | tuple) else (arg,)))


def _is_host(scheduler: Scheduler) -> bool:
    actor = scheduler.running_actor()
    return actor is not None and actor.name == f"host{actor.rank}"
