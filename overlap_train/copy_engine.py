"""Copies and signals that cost no SM: the copy engine on GPUs, a thread on the CPU.

A push is a copy into a peer's memory followed by the signal that says so (rule 1: the signal is behind the data). Both engines
work through their pushes in the order in which they were enqueued.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .watchdog import poll


@dataclass(frozen=True)
class Push:
    """Copy `source` into `target`, then `epoch` into `signal`.

    source, target: same shape and dtype, contiguous; target lies in a peer's memory.
    signal: int64 [1] in the peer's memory, written by this rank alone. epoch: int64 [1], this rank's own.
    after: (counter int64 [1], goal): do not start before the counter has reached the goal; None: start at once.
    """

    source: torch.Tensor
    target: torch.Tensor
    signal: torch.Tensor
    epoch: torch.Tensor
    after: tuple[torch.Tensor, int] | None = None


class CopyEngine(Protocol):
    """What operators need. `fork` .. `join` bracket one operator's pushes."""

    def fork(self) -> None:
        """Pushes from here on see what the caller's stream has written so far."""
        ...

    def push(self, pushes: list[Push]) -> None:
        """Enqueue pushes and return."""
        ...

    def launch(self, kernel: Callable[[], None], pushes: list[Push]) -> None:
        """Launch a kernel that produces what `pushes` wait for (`Push.after`) and enqueue them."""
        ...

    def join(self) -> None:
        """The caller's stream goes on only when all pushes are done; their sources may be reused."""
        ...

    def close(self) -> None:
        """Finish the pushes and end."""
        ...


@torch.no_grad()  # per thread: the copy engine's own has gradients on
def run_push(push: Push, pause: Callable[[float], None] = time.sleep, timeout_s: float = 60.0) -> None:
    """One push on the CPU. x86 and the interpreter keep stores in order, so copy-then-store is a release."""
    if push.after is not None:
        counter, goal = push.after
        if not poll(lambda: counter.item() >= goal, timeout_s, pause):
            return  # the kernel that counts gave up its own wait and reports it; sending nothing makes the peers report too
    push.target.copy_(push.source)
    pause(0.0)  # anything may run between data and signal; tests make it do so
    push.signal.copy_(push.epoch)


class HostCopyEngine:
    """A daemon thread plays the copy engine."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._queue: queue.SimpleQueue[Push | None] = queue.SimpleQueue()
        self._pending = 0
        self._error: Exception | None = None
        self._idle = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="overlap_train copy engine", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (push := self._queue.get()) is not None:
            try:
                run_push(push, timeout_s=self._timeout_s)
            except Exception as error:  # a thread cannot raise to its owner: join does
                self._error = error
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()

    def fork(self) -> None:
        pass  # the caller has computed everything before it enqueues

    def push(self, pushes: list[Push]) -> None:
        with self._idle:
            self._pending += len(pushes)
        for push in pushes:
            self._queue.put(push)

    def launch(self, kernel: Callable[[], None], pushes: list[Push]) -> None:
        self.push(
            pushes
        )  # first: an interpreted kernel returns only at its end, and its last tiles need the peers' pushes
        kernel()

    def join(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self._pending == 0)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


class StreamCopyEngine:
    """A side stream whose copies the driver gives to the copy engine."""

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._device = device
        self._held: list[Push] = []  # keeps sources from the allocator until the stream has read them
        self._forked, self._joined = torch.cuda.Event(), torch.cuda.Event()
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._handle = driver.CUstream(self.stream.cuda_stream)

    def fork(self) -> None:
        self._forked.record(torch.cuda.current_stream(self._device))
        self.stream.wait_event(self._forked)

    def push(self, pushes: list[Push]) -> None:
        self._held += pushes
        for push in pushes:
            if push.after is not None:
                self._wait_for_counter(*push.after)
            self._copy(push.target, push.source)
            self._copy(push.signal, push.epoch)  # a copy, not a write-value: a replayed graph sends a new epoch

    def launch(self, kernel: Callable[[], None], pushes: list[Push]) -> None:
        # Nothing between these two may wait for the device: the kernel ends only with the peers' pushes, and the peers are in
        # the same place.
        kernel()  # first: what waits on the device is enqueued after what it waits for (rule 4)
        self.push(pushes)

    def join(self) -> None:
        self._joined.record(self.stream)
        torch.cuda.current_stream(self._device).wait_event(self._joined)
        self._held.clear()

    def close(self) -> None:
        self.stream.synchronize()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """The driver's copy: a third of Tensor.copy_'s host time (5 against 15 microseconds, H200)."""
        self._check(self._driver.cuMemcpyDtoDAsync(target.data_ptr(), source.data_ptr(), source.nbytes, self._handle))

    def _wait_for_counter(self, counter: torch.Tensor, goal: int) -> None:
        """A wait by the stream itself. A waiting kernel might find no room beside a GEMM that fills every SM's registers and
        that in turn waits, through the peers, for this copy. The counter is this rank's own and no CTA waits while it owes
        a foreign tile, so this wait needs no bound of its own."""
        flags = self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self._check(self._driver.cuStreamWaitValue64(self._handle, counter.data_ptr(), goal, flags))

    def _check(self, answer: tuple[Any, ...]) -> None:
        status = answer[0]
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the CUDA driver refused a copy or a wait: {status.name}")
