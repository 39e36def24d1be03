"""What moves data in a group of GPUs that spans nodes: the copy engine, and a stream each for what leaves and for what arrives.

    sending     adds up partial sums, where there are any, and starts what crosses the network, in order
    arriving    waits for what has crossed, and passes it on inside the node (node_networks.py)

Nothing else waits for the network but the products that need it, and they by `wait_kernel`, as inside a node. Where one hardware
queue serves all streams, what stands at its head holds up the rest: planning/schedule/turns.py says what is enqueued when.

The two ways in which something crosses the network between GPUs of several nodes (node_streams.py).

    by exchanges    NCCL: a send to one twin and a receive from another, as one group. It writes into the memory of its own rank
                    only. What is for another rank of the node is received beside the slot, and the arriving stream copies it
                    there: data, then the sender's word
    by puts         NVSHMEM: data, then their signal, straight into the memory of the rank that they are for. Nobody has to say
                    what it expects, and nothing lands

The operators enqueue the same steps for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import cycle
from typing import Protocol

import torch

from ..gpu.driver import Blas, CudaDriver
from ..group.copy_engine import AT_LEAST, Route, StreamCopyEngine
from ..group.signals import FaultRecord
from ..schedule.inter_node import Crossing, crossings
from ..schedule.order import GATHER, Topology
from ..schedule.transfers import Leg, Legs
from .nccl import NcclTransport
from .puts import NvshmemPuts
from .slots import NodeCall
from .transport import Exchange, Piece

# Products that are enqueued before what sends them: at most two (schedule/turns.py), and the one that is sent next.
MOST_MARKED = 3


class Started(Protocol):
    """A call whose exchanges have begun (operators/crossings.py)."""

    def go_ahead(self, done: int, parts: int) -> None: ...

    def finish(self) -> None: ...


class NodeStreamEngine(StreamCopyEngine, ABC):
    """A copy engine whose operators end when what crosses the network has left, has arrived and is passed on.

    lands: whether what is for another rank of this node comes to this one first, and needs memory here. reduce_sms: that the sum
    of this node's partials may hold; in nodes of one rank there is none. gbs: GB/s that the network carries in each direction, if
    that was measured.
    """

    lands = True
    network: NcclTransport | NvshmemPuts

    def __init__(
        self, device: torch.device, driver: CudaDriver, network: NcclTransport | NvshmemPuts, fault: FaultRecord,
        blas: Blas | None = None, reduce_sms: int = 0, gbs: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(device, driver)
        self.network, self._fault, self._blas, self.reduce_sms, self.gbs = network, fault, blas, reduce_sms, gbs
        self._sending, self._arriving = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self._told, self._marks = driver.new_event(), (driver.new_event(), driver.new_event())
        self._products = cycle([driver.new_event() for _ in range(MOST_MARKED)])
        self._unfinished: list[Started] = []

    def products(self, spared_sms: int) -> AbstractContextManager[None]:
        """Bracket of library products that run beside the network's kernels."""
        return nullcontext() if self._blas is None else self._blas.sparing(spared_sms)

    def at_end(self, call: Started) -> None:
        """Let `finish_started` finish a call, at the latest in `join`: peers may need what nobody here has waited for."""
        self._unfinished.append(call)

    @property
    def has_started(self) -> bool:
        """Whether calls have begun whose exchanges may not all be enqueued."""
        return bool(self._unfinished)

    def go_ahead(self, done: int, parts: int) -> None:
        """Enqueue what these calls may send while `done` of `parts` equal parts of a product, which are enqueued, run."""
        for call in self._unfinished:
            call.go_ahead(done, parts)

    def finish_started(self) -> bool:
        """Enqueue what is left of these calls. Returns whether there were any."""
        had_begun = self.has_started
        while self._unfinished:
            self._unfinished.pop(0).finish()
        return had_begun

    def push_counted(self, source: torch.Tensor, routes: list[Route]) -> None:
        """Enqueue pushes of what a kernel that has been launched writes into `source`, each after its counter."""
        self._enqueue(source, routes)

    def wait_for_tiles(self, counter: torch.Tensor, tiles: int) -> None:
        """Hold the current stream until a kernel has stored so many tiles of a chunk. Of a kernel that has been launched: what
        stood before it in its hardware queue would wait for good."""
        stream = self._driver.current_stream()
        self._driver.check(self._driver.wait_value(stream, counter.data_ptr(), tiles, AT_LEAST))

    def mark(self) -> int:
        """What the caller's stream has been given so far, for `send_after`: until MOST_MARKED marks later."""
        mark = next(self._products)
        self._driver.check(self._driver.record_event(mark, self._driver.current_stream()))
        return mark

    def send_after(self, mark: int) -> None:
        """Let what is sent from now on leave after what is marked."""
        self._driver.check(self._driver.wait_event(self._sending.cuda_stream, mark, 0))

    def send_after_this(self) -> None:
        """Let what is sent from now on leave after what the caller's stream has been given so far."""
        self.send_after(self.mark())

    @abstractmethod
    def cross(
        self, call: NodeCall, crossing: Crossing, source: torch.Tensor, make: Callable[[], None] | None = None,
        landing: torch.Tensor | None = None,
    ) -> Exchange:  # fmt: skip
        """Start to send `source`, and to receive, after what was started before.

        make: enqueues what fills `source`, in the sending stream. landing: where to receive what `Crossing.lands`, which waits
        until all that `arrive` was called for is passed on; None: in its place in the own slot.
        """
        ...

    @abstractmethod
    def arrive(
        self, call: NodeCall, crossing: Crossing, exchange: Exchange, landing: torch.Tensor | None = None
    ) -> None:
        """Let an exchange arrive. After it its chunk has a signal (rule 1: data first), and is passed on inside the node.
        landing: as for `cross`; who reads what landed compares its word."""
        ...

    def _pass_on(self, routes: list[Route], source: torch.Tensor) -> None:
        start, stream = source.data_ptr(), self._arriving.cuda_stream
        for route in routes:
            self._driver.check(self._driver.copy(route.place, start + route.offset, route.nbytes, stream))
            self._driver.check(self._driver.copy(route.signal_at, route.epoch_at, 8, stream))

    def barrier(self, call: NodeCall, topology: Topology) -> None:
        """Tell all twins that this rank has come, and let their words arrive."""
        nothing = call.blocks.flatten()[:0]
        turns = crossings(GATHER, topology, chunks=1)
        self.send_after_this()
        exchanges = [self.cross(call, turn, nothing) for turn in turns]
        for turn, exchange in zip(turns, exchanges, strict=True):
            self.arrive(call, replace(turn, passed_on=Legs(())), exchange)

    def begin_ahead(self) -> None:
        """Begin the next operator, once the running one's exchanges are all enqueued: before the next one is sent, its slot may
        have to be waited for, and with one hardware queue what comes after that wait would never start."""
        self.finish_started()
        for mark, stream in zip(self._marks, (self._sending, self._arriving), strict=True):
            self._driver.check(self._driver.record_event(mark, stream.cuda_stream))
        super().begin_ahead()

    def join(self) -> None:
        current = self._driver.current_stream()
        if self._ahead is not None:  # what has been enqueued since is the next operator's
            for mark in self._marks:
                self._driver.check(self._driver.wait_event(current, mark, 0))
        else:
            self.finish_started()
            if self._held:
                for stream in (self._sending, self._arriving):
                    self._order(stream.cuda_stream, current)
        super().join()

    def _order(self, first: int, second: int) -> None:
        """What comes in stream `second` runs after what is in stream `first`."""
        failed = self._driver.record_event(self._told, first)
        self._driver.check(self._driver.wait_event(second, self._told, 0) or failed)

    def close(self) -> None:
        if self._fault.failed:
            self.network.close(orderly=False)  # or the streams would never end
        for stream in (self._sending, self._arriving):
            stream.synchronize()
        super().close()
        self.network.close(orderly=True)


class NodeExchangeEngine(NodeStreamEngine):
    """The engine of a group of GPUs that spans nodes whose data cross the network by NCCL: twins exchange, and both take part."""

    network: NcclTransport

    def cross(
        self, call: NodeCall, crossing: Crossing, source: torch.Tensor, make: Callable[[], None] | None = None,
        landing: torch.Tensor | None = None,
    ) -> Exchange:  # fmt: skip
        received = crossing.received
        into = call.chunk_of(received.fills, received.chunk) if landing is None else landing
        self._held.append(source)
        if landing is not None:
            self._held.append(landing)
            self._order(self._arriving.cuda_stream, self._sending.cuda_stream)
        with self._driver.in_stream(self._sending):
            if make is not None:
                make()
            return self.network.exchange(crossing, Piece(source, call.slot.epoch), Piece(into, call.crossed(received)))

    def arrive(
        self, call: NodeCall, crossing: Crossing, exchange: Exchange, landing: torch.Tensor | None = None
    ) -> None:
        received, passed_on = crossing.received, crossing.passed_on
        with self._driver.in_stream(self._arriving):
            exchange.arrive()
            if landing is None:
                self._tell(call, received)
                if not passed_on.all:
                    return
                # Bounded, and it notices a twin that is in another call.
                call.wait_chunk(received.fills, received.chunk)
            self._pass_on(call.routes(passed_on), call.blocks if landing is None else landing)

    def _tell(self, call: NodeCall, received: Leg) -> None:
        signal, word = call.signal_of(received.fills, received.chunk), call.crossed(received)
        self._driver.check(self._driver.copy(signal.data_ptr(), word.data_ptr(), 8, self._arriving.cuda_stream))


class Put:
    """An Exchange of which this rank need not wait for anything: its own part is done when its stream has come so far, and those
    who read what comes wait for its signal."""

    def arrive(self) -> None: ...


class NodePutEngine(NodeStreamEngine):
    """The engine of a group of GPUs that spans nodes whose data cross the network by NVSHMEM: only the sender acts."""

    network: NvshmemPuts
    lands = False

    def send_after(self, mark: int) -> None:
        """Let what is sent or passed on from now on come after what is marked. If the arriving stream looked for a piece before
        the call's epoch has begun, the epoch before would make it seem to be there. An exchange of NCCL needs no such order:
        what it sends orders it."""
        super().send_after(mark)
        self._driver.check(self._driver.wait_event(self._arriving.cuda_stream, mark, 0))

    def cross(
        self, call: NodeCall, crossing: Crossing, source: torch.Tensor, make: Callable[[], None] | None = None,
        landing: torch.Tensor | None = None,
    ) -> Exchange:  # fmt: skip
        self._held.append(source)
        with self._driver.in_stream(self._sending):
            if make is not None:
                make()
            self.network.put(source, call.place(crossing.sent), call.word, self._sending.cuda_stream)
        return Put()

    def arrive(
        self, call: NodeCall, crossing: Crossing, exchange: Exchange, landing: torch.Tensor | None = None
    ) -> None:
        received, passed_on = crossing.received, crossing.passed_on
        if crossing.lands or not passed_on.all:
            return
        with self._driver.in_stream(self._arriving):
            call.wait_chunk(received.fills, received.chunk)  # bounded, and it notices a twin that is in another call
            self._pass_on(call.routes(passed_on), call.blocks)
