"""A side stream whose copies the GPU's copy engine makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..gpu.driver import CudaDriver
from .copy_engine import Route

AT_LEAST = 0  # how a stream compares a word with the value that it waits for


class StreamCopyEngine:
    """A side stream whose copies the driver gives to the copy engine."""

    def __init__(self, device: torch.device, driver: CudaDriver) -> None:
        self._driver = driver
        self._held: list[torch.Tensor] = []  # keeps sources from the allocator until the stream has read them
        self._forked, self._joined, self._ended = driver.new_event(), driver.new_event(), driver.new_event()
        self._kept = driver.new_event()
        self._ahead: int | None = None  # how many sources are held for the operator that runs, where the next has begun
        self._last_stream: int | None = None  # that an operator was called in
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._handle = self.stream.cuda_stream

    def begin(self) -> None:
        self._driver.enter()  # it may be the first CUDA call of a thread of autograd
        current, last = self._driver.current_stream(), self._last_stream
        # What is captured into a graph cannot wait for what is not, and has not run; graph.py puts a barrier at both ends.
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

    def launch(self, kernel: Callable[[], None], source: torch.Tensor, routes: list[Route]) -> None:
        self._fork()
        # No host call between launch and enqueue may synchronise: every rank's kernel waits for pushes that its peers have not
        # enqueued yet.
        kernel()  # first: what waits on the device is enqueued after what it waits for (rule 4)
        self._enqueue(source, routes)

    def keep(self, source: torch.Tensor, target: torch.Tensor) -> None:
        # The driver copies within a GPU by a kernel. Beside a product that fills every SM it runs in the last wave of tiles.
        failed = self._driver.copy(target.data_ptr(), source.data_ptr(), target.nbytes, self._handle)
        self._driver.check(failed or self._driver.record_event(self._kept, self._handle))

    def wait_kept(self) -> None:
        self._driver.check(self._driver.wait_event(self._driver.current_stream(), self._kept, 0))

    def begin_ahead(self) -> None:
        self._ahead = len(self._held)
        self._driver.check(self._driver.record_event(self._joined, self._handle))

    def join(self) -> None:
        failed, count, self._ahead = 0, self._ahead, None
        if not self._held or count == 0:
            return
        if count is None:
            failed = self._driver.record_event(self._joined, self._handle)
        failed = self._driver.wait_event(self._driver.current_stream(), self._joined, 0) or failed
        self._driver.check(failed)
        del self._held[:count]

    def close(self) -> None:
        self.stream.synchronize()

    def _fork(self) -> None:
        failed = self._driver.record_event(self._forked, self._driver.current_stream())
        failed = self._driver.wait_event(self._handle, self._forked, 0) or failed
        self._driver.check(failed)

    def _enqueue(self, source: torch.Tensor, routes: list[Route]) -> None:
        """Enqueue the copies of pushes and their signals, each after its counter. The wait is made by the stream itself. A
        waiting kernel might find no room beside a GEMM that fills every SM's registers and that in turn waits, through the peers,
        for this copy. The counter is this rank's own and no CTA waits while it owes a foreign tile, so this wait needs no bound
        of its own. The signal is a copy, not a write-value: a replayed graph sends a new epoch."""
        self._held.append(source)
        start, stream, copy, wait_value = source.data_ptr(), self._handle, self._driver.copy, self._driver.wait_value
        for route in routes:
            failed = wait_value(stream, route.counter_at, route.goal, AT_LEAST) if route.counter_at else 0
            failed = failed or copy(route.place, start + route.offset, route.nbytes, stream)
            failed = failed or copy(route.signal_at, route.epoch_at, 8, stream)  # rule 1: none without its data
            if failed:
                self._driver.check(failed)
