"""Copies and signals that cost no SM: by a side stream, which gives them to the GPU's copy engine; by a thread on the CPU.

A push is a copy into a peer's memory followed by its signal (rule 1: data first, then the signal). A pull is a copy out of a
peer's memory, after a barrier: the peer has put there what is copied. Both engines work through these in the order in which they
were enqueued. Where pushes go does not change from call to call: a `Route` is worked out once, and a call only adds the source.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..gpu.driver import CudaDriver, Word
from .signals import poll


@dataclass(frozen=True)
class Push:
    """Copy `source` into `target`, then `epoch` into `signal`; not before the counter, int64 [1], has reached the goal in
    `after`.

    source, target: same shape and dtype, contiguous; target lies in a peer's memory. signal: int64 [1] in the peer's memory,
    written by this rank alone. epoch: int64 [1], this rank's own.
    """

    source: torch.Tensor
    target: torch.Tensor
    signal: torch.Tensor
    epoch: torch.Tensor
    after: tuple[torch.Tensor, int] | None = None


class Route:
    """A Push without its source. It takes what lies `first` elements after the source's start, whatever the source's strides."""

    def __init__(
        self, first: int, target: torch.Tensor, signal: torch.Tensor, epoch: torch.Tensor,
        after: tuple[torch.Tensor, int] | None,
    ) -> None:  # fmt: skip
        self.first, self.target, self.signal, self.epoch, self.after = first, target, signal, epoch, after
        # the same in bytes and addresses, for the driver
        self.offset = first * target.element_size()
        self.nbytes, self.place = Word(target.nbytes), Word(target.data_ptr())
        self.signal_at, self.epoch_at = Word(signal.data_ptr()), Word(epoch.data_ptr())
        self.counter_at = None if after is None else Word(after[0].data_ptr())
        self.goal = Word(0 if after is None else after[1])

    def push(self, source: torch.Tensor) -> Push:
        """The push of this route from `source`, which may have any shape; what is taken of it is contiguous."""
        start, shape = source.storage_offset() + self.first, self.target.shape
        part = source.as_strided((self.target.numel(),), (1,), start).view(shape)
        return Push(part, self.target, self.signal, self.epoch, self.after)


class CopyEngine:
    """What operators need of a copy engine. Between `begin` and `join` are one operator's pushes and pulls."""

    def begin(self) -> None:
        """Let the caller's stream wait for the previous operator, which may have run in another stream."""

    def push(self, source: torch.Tensor, routes: list[Route]) -> None:
        """Enqueue pushes of what the caller's stream has written into `source` so far, and return."""

    def launch(self, kernel: Callable[[], None], *pushes: tuple[torch.Tensor, list[Route]]) -> None:
        """Launch a kernel that writes the sources and counts what their pushes wait for (`Route.after`), and enqueue these."""

    def pull(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Enqueue copies of what lies at peers, once the caller's stream has come here. `join` waits for them, too."""

    def keep(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Enqueue a copy within this rank's memory behind what is pushed. Both are contiguous. This operator has pushed from
        `source` before, which ordered the copy behind what the caller's stream had enqueued by then, and keeps `source` until
        `join`."""

    def wait_kept(self) -> None:
        """The caller's stream goes on only when what was to be kept last is copied."""

    def begin_ahead(self) -> None:
        """What is pushed or pulled from here on is the next operator's. The next `join` need not wait for it."""

    def join(self) -> None:
        """The caller's stream goes on only when all pushes and pulls are done; the sources of pushes may be reused."""

    def is_idle(self) -> bool:
        """Whether what operators have enqueued on the device is done. Any thread may ask. In CPU processes it always is: an
        operator has returned when its copies are made."""
        return True

    def close(self) -> None:
        """Finish what is enqueued and end."""


AT_LEAST = 0  # how a stream compares a word with the value that it waits for
SIGNAL_BYTES = Word(8)


class StreamCopyEngine(CopyEngine):
    """A side stream whose copies the driver gives to the copy engine."""

    def __init__(self, device: torch.device, driver: CudaDriver) -> None:
        self._driver = driver
        self._held: list[torch.Tensor] = []  # keeps sources from the allocator until the stream has read them
        self._forked, self._joined, self._ended = driver.new_event(), driver.new_event(), driver.new_event()
        self._kept = driver.new_event()
        self._ahead: int | None = None  # how many sources are held for the operator that runs, where the next has begun
        self._last_stream: int | None = None  # that an operator was called in
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._handle = Word(self.stream.cuda_stream)

    def begin(self) -> None:
        self._driver.enter()  # it may be the first CUDA call of a thread of autograd
        current, last = self._driver.current_stream(), self._last_stream
        # What is captured into a graph cannot wait for what is not, and has not run; registry.py puts a barrier at both ends.
        if current == last or self._driver.is_capturing():
            return
        if last is not None:
            self._driver.check(self._driver.record_event(self._ended, last))
            self._driver.check(self._driver.wait_event(current, self._ended, 0))
        self._last_stream = current

    def push(self, source: torch.Tensor, routes: list[Route]) -> None:
        self._fork()
        self._enqueue(source, routes)

    def pull(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        self._fork()
        self._held += targets
        failed, stream, copy = 0, self._handle, self._driver.copy
        for source, target in zip(sources, targets, strict=True):
            failed = copy(target.data_ptr(), source.data_ptr(), target.nbytes, stream) or failed
        self._driver.check(failed)

    def launch(self, kernel: Callable[[], None], *pushes: tuple[torch.Tensor, list[Route]]) -> None:
        self._fork()
        # No host call between launch and enqueue may synchronise: every rank's kernel waits for pushes that its peers have not
        # enqueued yet.
        kernel()  # first: what waits on the device is enqueued after what it waits for (rule 4)
        for source, routes in pushes:
            self._enqueue(source, routes)

    def keep(self, source: torch.Tensor, target: torch.Tensor) -> None:
        # The driver copies within a GPU by a kernel. Beside a product that fills every SM it runs in the last wave of tiles.
        driver = self._driver
        failed = driver.copy(target.data_ptr(), source.data_ptr(), target.nbytes, self._handle)
        driver.check(failed or driver.record_event(self._kept, self._handle))

    def wait_kept(self) -> None:
        driver = self._driver
        driver.check(driver.wait_event(driver.current_stream(), self._kept, 0))

    def begin_ahead(self) -> None:
        self._ahead = len(self._held)
        self._driver.check(self._driver.record_event(self._joined, self._handle))

    def join(self) -> None:
        count, driver = self._ahead, self._driver
        self._ahead = None
        if not self._held or count == 0:
            return
        failed = driver.record_event(self._joined, self._handle) if count is None else 0
        failed = driver.wait_event(driver.current_stream(), self._joined, 0) or failed
        if failed:
            driver.check(failed)
        del self._held[:count]

    def is_idle(self) -> bool:
        device, last = self.stream.device, self._last_stream
        caller = torch.cuda.ExternalStream(last, device) if last else torch.cuda.default_stream(device)
        return self.stream.query() and caller.query()

    def close(self) -> None:
        self.stream.synchronize()

    def _fork(self) -> None:
        driver = self._driver
        failed = driver.record_event(self._forked, driver.current_stream())
        failed = driver.wait_event(self._handle, self._forked, 0) or failed
        if failed:
            driver.check(failed)

    def _enqueue(self, source: torch.Tensor, routes: list[Route]) -> None:
        """Enqueue the copies of pushes and their signals, each after its counter. The wait is made by the stream itself. A
        waiting kernel might find no room beside a GEMM that fills every SM's registers and that in turn waits, through the peers,
        for this copy. The counter is this rank's own and no CTA waits while it owes a foreign tile, so this wait needs no bound
        of its own. The signal is a copy, not a write-value: a replayed graph sends a new epoch."""
        self._held.append(source)
        start, stream, driver = source.data_ptr(), self._handle, self._driver
        copy = driver.copy
        for route in routes:
            counter = route.counter_at
            failed = 0 if counter is None else driver.wait_value(stream, counter, route.goal, AT_LEAST)
            failed = failed or copy(route.place, start + route.offset, route.nbytes, stream)
            # rule 1: none without its data
            failed = failed or copy(route.signal_at, route.epoch_at, SIGNAL_BYTES, stream)
            if failed:
                driver.check(failed)


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


class HostCopyEngine(CopyEngine):
    """A daemon thread plays the copy engine."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._pending = 0
        self._ahead: int | None = None  # how many of these are of the next operator, where it has begun
        self._error: Exception | None = None
        self._idle = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="overlap_train copy engine", daemon=True)
        self._thread.start()

    @torch.inference_mode()  # of this thread: what is pulled may be an inference tensor
    def _work(self) -> None:
        while (copy := self._queue.get()) is not None:
            try:
                copy()
            except Exception as error:  # a thread cannot raise to its owner: join does
                self._error = error
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()

    def push(self, source: torch.Tensor, routes: list[Route]) -> None:
        self._enqueue([partial(run_push, route.push(source), timeout_s=self._timeout_s) for route in routes])

    def pull(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        self._enqueue([partial(target.copy_, source) for source, target in zip(sources, targets, strict=True)])

    def _enqueue(self, copies: Sequence[Callable[[], object]]) -> None:
        with self._idle:
            self._pending += len(copies)
            self._ahead = None if self._ahead is None else self._ahead + len(copies)
        for copy in copies:
            self._queue.put(copy)

    def launch(self, kernel: Callable[[], None], *pushes: tuple[torch.Tensor, list[Route]]) -> None:
        # Pushes first: an interpreted kernel returns at its end, and its last tiles need the peers'.
        for source, routes in pushes:
            self.push(source, routes)
        kernel()

    def keep(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.pull([source], [target])

    def wait_kept(self) -> None:
        with self._idle:
            while self._pending:
                self._idle.wait()

    def begin_ahead(self) -> None:
        self._ahead = 0

    def join(self) -> None:
        left, self._ahead = self._ahead or 0, None
        with self._idle:
            while self._pending > left:
                self._idle.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
