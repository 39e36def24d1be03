"""Simulated CUDA streams, so that the real `StreamCopyEngine` and the asynchrony of a GPU run under the scheduler.

    host of rank r      an actor that only enqueues: kernel launches and torch operations go to its current stream
    stream              an actor that runs its operations in order
    hardware queues     one per stream, or (`one_queue`, CUDA_DEVICE_MAX_CONNECTIONS=1) one for all streams of a rank:
                        then no operation starts before all operations that were enqueued earlier have started

Torch operations are caught by a dispatch mode. One that makes a new tensor runs at once, which gives its shape, and
again in its stream, which gives its values; until then the tensor holds NaN.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.protocol.interleaving import Scheduler
from tests.protocol.interpreter_hooks import read_word
from tests.protocol.simulated_ranks import SimulatedDomain, Simulation, core


@dataclass(eq=False)
class Operation:
    """One entry of a stream: runs when `ready` holds and everything before it in the stream is done."""

    name: str
    run: Callable[[], object]
    ready: Callable[[], bool] = lambda: True
    started: bool = False
    done: bool = False


@dataclass(frozen=True)
class StreamSimulation(Simulation):
    """A machine whose ranks have GPUs: asynchronous streams, and waits for chunks in kernels."""

    device_waits: bool = True
    one_queue: bool = False
    gpus: dict[int, SimulatedGpu] = field(default_factory=dict)

    def engine(self, scheduler: Scheduler, rank: int) -> Any:
        """The real engine on a simulated side stream."""
        self.gpus[rank] = gpu = SimulatedGpu(scheduler, rank, self.one_queue)
        fakes = {"cuda.bindings": SimpleNamespace(driver=gpu.driver())}
        with mock.patch.object(torch.cuda, "Stream", gpu.new_stream), _modules(fakes):
            return core("copy_engine").StreamCopyEngine(torch.device("cpu"))

    def patch(self, scheduler: Scheduler) -> None:
        super().patch(scheduler)

        def current_gpu() -> SimulatedGpu:
            return self.gpus[scheduler.running_actor().rank]

        scheduler.patch(torch.cuda, "current_stream", lambda device=None: current_gpu().current)
        scheduler.patch(torch.cuda, "stream", lambda stream: current_gpu().switched_to(stream))
        scheduler.during_run(_Enqueueing(scheduler, current_gpu))

        def enqueue_launch(run: Callable[[], None]) -> bool:
            if not _is_host(scheduler):
                return False
            current_gpu().current.enqueue(Operation("kernel", run))
            return True

        scheduler.enqueue_launch = enqueue_launch

    def spawn_hosts(self, scheduler: Scheduler, body: Callable[[SimulatedDomain], None]) -> None:
        """As `Simulation.spawn_hosts`; the rank's streams end once they have run everything."""

        def host(domain: SimulatedDomain) -> None:
            try:
                body(domain)
            finally:
                self.gpus[domain.rank].close()

        for domain in self.ranks(scheduler):
            scheduler.spawn(f"host{domain.rank}", partial(host, domain), rank=domain.rank)


class SimulatedGpu:
    """The streams of one rank and the order in which their operations were enqueued."""

    def __init__(self, scheduler: Scheduler, rank: int, one_queue: bool) -> None:
        self.scheduler, self.rank, self.closed = scheduler, rank, False
        self._one_queue = one_queue
        self._order: deque[Operation] = deque()  # enqueued, not started
        self.streams: list[SimulatedStream] = []
        self.current = self.new_stream()

    def new_stream(self, device: object = None, priority: int = 0) -> SimulatedStream:
        stream = SimulatedStream(self, len(self.streams))
        self.streams.append(stream)
        return stream

    @contextmanager
    def switched_to(self, stream: SimulatedStream) -> Iterator[None]:
        """`with torch.cuda.stream(stream)`."""
        previous, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = previous

    def driver(self) -> SimpleNamespace:
        """`cuda.bindings.driver` as far as the core uses it, for this rank's streams."""
        return SimpleNamespace(
            CUstream=lambda number: number,
            CUstreamWaitValue_flags=SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ="GEQ"),
            CUresult=SimpleNamespace(CUDA_SUCCESS="SUCCESS"),
            cuMemcpyDtoDAsync=self._copy_by_address,
            cuStreamWaitValue64=self._wait_for_value,
        )

    def _copy_by_address(self, target: int, source: int, nbytes: int, stream: int) -> tuple[str]:
        half = nbytes // 2 if nbytes > 8 else 0

        def run() -> None:
            for start, end in ((0, half), (half, nbytes)):
                self.scheduler.step()
                ctypes.memmove(target + start, source + start, end - start)

        self.streams[stream].enqueue(Operation("copy", run))
        return ("SUCCESS",)

    def _wait_for_value(self, stream: int, address: int, goal: int, flags: str) -> tuple[str]:
        assert flags == "GEQ"
        self.scheduler.signals.add(address)
        name = f"{self.scheduler.name_of(address)} to reach {goal}"
        self.streams[stream].enqueue(Operation(name, lambda: None, lambda: read_word(address, 8) >= goal))
        return ("SUCCESS",)

    def close(self) -> None:
        """Let the streams end when they are empty."""
        self.closed = True

    def enqueued(self, operation: Operation) -> None:
        self._order.append(operation)

    def may_start(self, operation: Operation) -> bool:
        """Whether the hardware has come to the operation."""
        return operation.ready() and (not self._one_queue or self._order[0] is operation)

    def start(self, operation: Operation) -> None:
        operation.started = True
        self._order.remove(operation)


class SimulatedStream:
    """What the core uses of a `torch.cuda.Stream`, run by an actor."""

    def __init__(self, gpu: SimulatedGpu, number: int) -> None:
        self.cuda_stream = number
        self._gpu, self._queue = gpu, deque()
        self._name = f"stream{gpu.rank}.{number}"
        gpu.scheduler.spawn(self._name, self._work, rank=gpu.rank)

    def enqueue(self, operation: Operation) -> None:
        self._queue.append(operation)
        self._gpu.enqueued(operation)

    def wait_stream(self, other: SimulatedStream) -> None:
        """Operations from here on run behind those that `other` has now."""
        if other._queue:
            last = other._queue[-1]
            self.enqueue(Operation(f"wait for {other._name}", lambda: None, lambda: last.done))

    def synchronize(self) -> None:
        self._gpu.scheduler.wait_until(lambda: not self._queue, f"{self._name} to be empty")

    def _work(self) -> None:
        scheduler = self._gpu.scheduler
        while True:
            scheduler.wait_until(self._can_go_on, f"its next operation ({self._next_name()}) to be ready")
            if not self._queue:
                return
            operation = self._queue[0]
            self._gpu.start(operation)
            scheduler.step()
            operation.run()
            operation.done = True
            self._queue.popleft()

    def _can_go_on(self) -> bool:
        return self._gpu.may_start(self._queue[0]) if self._queue else self._gpu.closed

    def _next_name(self) -> str:
        return self._queue[0].name if self._queue else "none yet"


class _Enqueueing(TorchDispatchMode):
    """Sends the torch operations of host actors to their current stream."""

    def __init__(self, scheduler: Scheduler, current_gpu: Callable[[], SimulatedGpu]) -> None:
        super().__init__()
        self._scheduler, self._current_gpu = scheduler, current_gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not _is_host(self._scheduler) or not any(isinstance(arg, torch.Tensor) for arg in args):
            return func(*args, **kwargs)
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads device memory"
        call = partial(func, *args, **kwargs)
        if func._schema.is_mutable:
            self._enqueue(func, partial(_copy_in_halves, self._scheduler, *args) if func in _COPIES else call)
            return kwargs.get("out", args[0])
        result = call()
        if not any(returned.alias_info for returned in func._schema.returns):  # not a view
            self._enqueue(func, lambda: result.copy_(call()))
            result.fill_(torch.nan)
        return result

    def _enqueue(self, func: Any, run: Callable[[], object]) -> None:
        self._current_gpu().current.enqueue(Operation(str(func), run))


_COPIES = (torch.ops.aten.copy_.default,)


def _copy_in_halves(scheduler: Scheduler, target: torch.Tensor, source: torch.Tensor, *flags: object) -> None:
    """Others may run in the middle of a copy."""
    if target.shape != source.shape or target.dim() == 0:
        target.copy_(source)
        return
    for to, piece in zip(target.chunk(2), source.chunk(2), strict=True):
        scheduler.step()
        to.copy_(piece)


def _is_host(scheduler: Scheduler) -> bool:
    actor = scheduler.running_actor()
    return actor is not None and actor.name == f"host{actor.rank}"


@contextmanager
def _modules(fakes: dict[str, Any]) -> Iterator[None]:
    """`sys.modules` with fakes; not mock.patch.dict, which would also forget what is imported meanwhile."""
    missing = object()
    originals = {name: sys.modules.get(name, missing) for name in fakes}
    sys.modules.update(fakes)
    try:
        yield
    finally:
        for name, original in originals.items():
            if original is missing:
                del sys.modules[name]
            else:
                sys.modules[name] = original
