"""What moves data in a group of GPUs that spans nodes: the copy engine, and a stream each for what leaves and for what arrives.

    sending     adds up partial sums, where there are any, and starts the exchanges with the twins, in order
    arriving    waits for an exchange, then tells those who wait for its chunk, then passes it on inside the node

The network writes into the memory of its own rank only. What is for another rank of the node is received beside the slot, and
the arriving stream copies it there: data, then the sender's word.

Nothing else waits for the network but the products that need it, and they by `wait_kernel`, as inside a node. What waits is
enqueued as late as it may be (`arrive`): where one hardware queue serves all streams, what stands at its head holds up the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from ..gpu.blas import Blas
from ..gpu.driver import CudaDriver
from ..planning.schedule import GATHER, Crossing, Leg, Legs, Topology, crossings
from ..symmetric.inter_node import Exchange, Piece, StreamTransport
from .copy_engine import Route, StreamCopyEngine
from .node_slot import NodeCall
from .watchdog import FaultRecord


class NodeStreamEngine(StreamCopyEngine):
    """A copy engine whose operators end when what crosses the network has left, has arrived and is passed on."""

    def __init__(
        self, device: torch.device, driver: CudaDriver, network: StreamTransport, fault: FaultRecord, blas: Blas | None
    ) -> None:
        super().__init__(device, driver)
        self.network, self._fault, self._blas = network, fault, blas
        self._sending, self._arriving = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self._told, self._marks = driver.new_event(), (driver.new_event(), driver.new_event())
        self._unfinished: list[Callable[[], None]] = []

    def begin(self) -> None:
        if self._driver.is_capturing():
            raise RuntimeError(
                "a CUDA graph is being captured in a group that spans nodes, whose exchanges by NCCL a thread has to watch; "
                "train without CUDA graphs, or use method='collective'"
            )
        super().begin()

    def products(self, spared_sms: int) -> AbstractContextManager[None]:
        """Bracket of library products that run beside the network's kernels."""
        return nullcontext() if self._blas is None else self._blas.sparing(spared_sms)

    def at_end(self, task: Callable[[], None]) -> None:
        """`finish_started` runs it, at the latest in `join`: peers may need what nobody here has waited for."""
        self._unfinished.append(task)

    def finish_started(self) -> None:
        """Enqueue what is left of the calls that have begun."""
        while self._unfinished:
            self._unfinished.pop(0)()

    def send_after_this(self) -> None:
        """What is sent from now on leaves after what the caller's stream has been given so far."""
        self._order(self._driver.current_stream(), self._sending.cuda_stream)

    def cross(
        self, call: NodeCall, crossing: Crossing, source: torch.Tensor, make: Callable[[], None] | None = None,
        landing: torch.Tensor | None = None,
    ) -> Exchange:  # fmt: skip
        """Start to send `source`, and to receive, when the exchange before it has ended.

        make: enqueues what fills `source`, in the sending stream. landing: where to receive what `Crossing.lands`, which waits
        until all that `arrive` was called for is passed on; None: in its place in the own slot.
        """
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
        """After the exchange its chunk has a signal (rule 1: data first), and is passed on inside the node. landing: as for
        `cross`; who reads what landed compares its word."""
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

    def _pass_on(self, routes: list[Route], source: torch.Tensor) -> None:
        start, stream = source.data_ptr(), self._arriving.cuda_stream
        for route in routes:
            self._driver.check(self._driver.copy(route.place, start + route.offset, route.nbytes, stream))
            self._driver.check(self._driver.copy(route.signal_at, route.epoch_at, 8, stream))

    def meet(self, call: NodeCall, topology: Topology) -> None:
        """Tell all twins that this rank has come, and let their words arrive."""
        nothing = call.blocks.flatten()[:0]
        turns = crossings(GATHER, topology, chunks=1)
        self.send_after_this()
        exchanges = [self.cross(call, turn, nothing) for turn in turns]
        for turn, exchange in zip(turns, exchanges, strict=True):
            self.arrive(call, replace(turn, passed_on=Legs(())), exchange)

    def begin_ahead(self) -> None:
        """The running operator's exchanges are all enqueued first: before the next one is sent, its slot may have to be waited
        for, and with one hardware queue what comes after that wait would never start."""
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
