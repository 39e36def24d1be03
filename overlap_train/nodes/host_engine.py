"""What moves data in a group that spans nodes: the copy engine, a thread for what waits, and the network.

What waits for the network, or for the node's partial sums, never holds up what waits for nothing: it has a thread of its own, as
on a GPU it would have a stream of its own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from ..group.copy_engine import HostCopyEngine
from ..group.signals import FaultRecord, poll
from ..schedule.order import Topology
from ..schedule.transfers import Leg
from ..symmetric.agreement import OverlapTimeoutError
from .gloo import GlooTransport
from .slots import NodeCall

_NOTHING = torch.empty(0, dtype=torch.uint8)


class Later:
    """A daemon thread that runs what it is given, in that order, and skips the rest after a failure."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending = 0
        self._error: Exception | None = None
        self._idle = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="overlap_train between nodes", daemon=True)
        self._thread.start()

    def run(self, task: Callable[[], None]) -> None:
        """Enqueue it, and return."""
        with self._idle:
            self._pending += 1
        self._queue.put(task)

    @torch.no_grad()  # per thread
    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                if self._error is None:
                    task()
            except Exception as error:  # a thread cannot raise to its owner: join does
                self._error = error
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()

    def join(self) -> None:
        """Return when everything has run; raises what it raised."""
        with self._idle:
            self._idle.wait_for(lambda: self._pending == 0)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


class NodeEngine(HostCopyEngine):
    """The copy engine of CPU processes in a group that spans nodes. Its operators end when what waits has run, too, and when
    nothing is on its way into the network."""

    def __init__(self, timeout_s: float, network: GlooTransport, fault: FaultRecord) -> None:
        super().__init__(timeout_s)
        self.network, self.later, self._fault = network, Later(), fault

    def send(self, call: NodeCall, block: torch.Tensor, leg: Leg) -> None:
        """Enqueue the chunk of `block` [block shape] that a leg carries over the network."""
        self.network.put(block.chunk(call.chunks)[leg.chunk], call.place(leg), call.word)

    def after_tiles(self, counter: torch.Tensor, tiles: int, send: Callable[[], None]) -> None:
        """Let `later` run `send` once a kernel has stored so many tiles of a chunk. If they never come, it sends nothing: the
        kernel reports why, and the peers whom they were for."""
        self.later.run(lambda: send() if poll(lambda: counter.item() >= tiles, self._timeout_s) else None)

    def barrier(self, call: NodeCall, topology: Topology) -> None:
        """Tell all twins that this rank has come: chunk 0 of its block, without data."""
        for node in range(topology.nodes):
            if node != topology.node:
                self.network.put(_NOTHING, call.place_of(topology.twin(node), topology.rank, 0), call.word)

    def join(self) -> None:
        try:
            try:
                super().join()
            finally:
                self.later.join()
            if not self._fault.failed:  # else what is under way may never arrive
                self.network.join()
        except OverlapTimeoutError as error:  # of a send: by `later`, or under way
            self._fault.keep(error)

    def close(self) -> None:
        self.later.close()
        self.network.close(orderly=not self._fault.failed)
        super().close()
