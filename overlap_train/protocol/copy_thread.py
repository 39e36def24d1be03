"""A thread that plays the copy engine on the CPU."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from .copy_engine import Pull, Push, Route
from .watchdog import poll


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


@torch.no_grad()
def run_pull(pull: Pull) -> None:
    """One pull on the CPU."""
    pull.target.copy_(pull.source)


class HostCopyEngine:
    """A daemon thread plays the copy engine."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._queue: queue.SimpleQueue[Push | Pull | None] = queue.SimpleQueue()
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
                if isinstance(copy, Pull):
                    run_pull(copy)
                else:
                    run_push(copy, timeout_s=self._timeout_s)
            except Exception as error:  # a thread cannot raise to its owner: join does
                self._error = error
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()

    def begin(self) -> None:
        pass  # a CPU process has no streams

    def push(self, source: torch.Tensor, routes: list[Route]) -> None:
        self._enqueue([route.push(source) for route in routes])

    def pull(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        self._enqueue([Pull(source, target) for source, target in zip(sources, targets, strict=True)])

    def _enqueue(self, copies: Sequence[Push | Pull]) -> None:
        with self._idle:
            self._pending += len(copies)
            self._ahead = None if self._ahead is None else self._ahead + len(copies)
        for copy in copies:
            self._queue.put(copy)

    def launch(self, kernel: Callable[[], None], source: torch.Tensor, routes: list[Route]) -> None:
        self.push(source, routes)  # first: an interpreted kernel returns at its end, and its last tiles need the peers'
        kernel()

    def keep(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.pull([source], [target])

    def wait_kept(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self._pending == 0)

    def begin_ahead(self) -> None:
        self._ahead = 0

    def join(self) -> None:
        left, self._ahead = self._ahead or 0, None
        with self._idle:
            self._idle.wait_for(lambda: self._pending <= left)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
