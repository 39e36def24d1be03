"""A simulated GPU of one rank: streams, events, and as much of the CUDA driver as the core calls.

stream              an actor that runs its operations in order
hardware queues     one per stream, or (`one_queue`, CUDA_DEVICE_MAX_CONNECTIONS=1) one for all streams of a rank:
                    then no operation starts before all operations that were enqueued earlier have started
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.protocol.interleaving import Scheduler
from tests.protocol.interpreter_hooks import read_word


@dataclass(eq=False)
class Operation:
    """One entry of a stream: runs when `ready` holds and everything before it in the stream is done."""

    name: str
    run: Callable[[], object]
    ready: Callable[[], bool] = lambda: True
    done: bool = False


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

    def close(self) -> None:
        """Let the streams end when they are empty."""
        self.closed = True

    def enqueued(self, operation: Operation) -> None:
        self._order.append(operation)

    def may_start(self, operation: Operation) -> bool:
        """Whether the hardware has come to the operation."""
        return operation.ready() and (not self._one_queue or self._order[0] is operation)

    def started(self, operation: Operation) -> None:
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

    def last(self) -> Operation | None:
        return self._queue[-1] if self._queue else None

    def synchronize(self) -> None:
        self._gpu.scheduler.wait_until(lambda: not self._queue, f"{self._name} to be empty")

    def _work(self) -> None:
        scheduler = self._gpu.scheduler
        while True:
            scheduler.wait_until(self._can_go_on, f"its next operation ({self._next_name()}) to be ready")
            if not self._queue:
                return
            operation = self._queue[0]
            self._gpu.started(operation)
            scheduler.step()
            operation.run()
            operation.done = True
            self._queue.popleft()

    def _can_go_on(self) -> bool:
        return self._gpu.may_start(self._queue[0]) if self._queue else self._gpu.closed

    def _next_name(self) -> str:
        return self._queue[0].name if self._queue else "none yet"


class SimulatedDriver:
    """`CudaDriver` for the streams of one GPU. Streams and events are numbers here, too: its calls get each Word as its value."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self._recorded: list[Operation | None] = []  # by event: what it was recorded behind
        for name in ("copy", "wait_value", "record_event", "wait_event"):
            setattr(self, name, partial(self._call, name))

    def _call(self, name: str, *words: Any) -> None:
        getattr(type(self), name)(self, *(getattr(word, "value", word) for word in words))

    def current_stream(self) -> int:
        return self._gpu.current.cuda_stream

    def check(self, status: None) -> None:
        pass

    def enter(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    @contextmanager
    def in_stream(self, stream: SimulatedStream) -> Iterator[None]:
        before, self._gpu.current = self._gpu.current, stream
        try:
            yield
        finally:
            self._gpu.current = before

    def new_event(self) -> int:
        self._recorded.append(None)
        return len(self._recorded) - 1

    def record_event(self, event: int, stream: int) -> None:
        self._recorded[event] = self._gpu.streams[stream].last()

    def wait_event(self, stream: int, event: int, flags: int) -> None:
        """Operations from here on run behind what the event was recorded behind; by now, not at its next recording."""
        last = self._recorded[event]
        if last is not None:
            self._gpu.streams[stream].enqueue(Operation("wait for an event", lambda: None, lambda: last.done))

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Others may run in the middle of a copy, but not of a word."""
        half = nbytes // 2 if nbytes > 8 else 0

        def run() -> None:
            for start, end in ((0, half), (half, nbytes)):
                self._gpu.scheduler.step()
                ctypes.memmove(target + start, source + start, end - start)

        self._gpu.streams[stream].enqueue(Operation("copy", run))

    def wait_value(self, stream: int, address: int, goal: int, flags: int) -> None:
        assert flags == 0, "until the word is at least the goal"
        self._gpu.scheduler.signals.add(address)
        name = f"{self._gpu.scheduler.name_of(address)} to reach {goal}"
        self._gpu.streams[stream].enqueue(Operation(name, lambda: None, lambda: read_word(address, 8) >= goal))
