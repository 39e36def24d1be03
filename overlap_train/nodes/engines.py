"""What moves data in a group that spans nodes: the copy engine inside the node, and what sends and receives between nodes.

    sending     adds up partial sums, where there are any, and starts what goes to other nodes, in order
    arriving    waits for what has come from other nodes, and passes it on inside the node

These two are streams on GPUs, threads of CPU processes. Nothing else waits for the network but the products that need it, and
they as inside a node. Where one hardware queue serves all streams, what stands at its head holds up the rest:
schedule/inter_node.py says what is enqueued when. The operators enqueue the same steps for every engine:

    HostEngine       CPU processes, by gloo: a piece, then its signal, go into the heap of the rank that they are for
    NvshmemEngine    GPUs, by NVSHMEM: the same. Nobody has to say what it expects
    NcclEngine       GPUs, by NCCL: a send to one rail peer and a receive from another, as one group. It writes into the memory
                     of its own rank only. What is for another rank of the node comes into a receive buffer, and the arriving
                     stream copies it on: data, then the sender's word
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Protocol

import torch

from ..gpu.driver import Blas, CudaDriver
from ..gpu.launch import Launch
from ..group.copy_engine import AT_LEAST, CopyEngine, HostCopyEngine, Route, StreamCopyEngine, run_push
from ..group.signals import FaultRecord
from ..ops.launch import aligned
from ..schedule.inter_node import SendRecv, send_recvs
from ..schedule.order import GATHER, Topology
from ..schedule.transfers import Leg, Legs
from ..symmetric.agreement import OverlapTimeoutError
from .gloo import GlooTransport
from .measure import grid_of
from .nccl import NcclTransport
from .puts import NvshmemPuts
from .slots import NodeCall
from .transport import Exchange, Piece

MOST_MARKED = 3  # products that are enqueued before what sends them: at most two, and the one that is sent next


class Started(Protocol):
    """A call whose exchanges have begun (exchanges.py)."""

    def go_ahead(self, done: int, parts: int) -> None: ...

    def finish(self) -> None: ...


class Put:
    """An Exchange of which this rank need not wait for anything: who reads what comes waits for its signal."""

    def arrive(self) -> None: ...


class InterNodeEngine(CopyEngine, ABC):
    """A copy engine whose operators end when what goes to other nodes has left, and what comes has arrived and is passed on.

    needs_buffers: whether what is for another rank of this node comes to this one first. reduce_sms: that the sum of this node's
    partials may hold; in nodes of one rank there is none. gbs: GB/s that the network carries in each direction, if that was
    measured.
    """

    needs_buffers = False
    reduce_sms = 0
    gbs = 0.0
    network: GlooTransport | NcclTransport | NvshmemPuts

    def __init__(self) -> None:
        self._unfinished: list[Started] = []

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

    def products(self, spared_sms: int) -> AbstractContextManager[None]:
        """Scope of library products that run beside the network's kernels."""
        return nullcontext()

    @abstractmethod
    def push_counted(self, source: torch.Tensor, routes: list[Route]) -> None:
        """Enqueue pushes of what a kernel that has been launched writes into `source`, each after its counter."""

    @abstractmethod
    def wait_for_tiles(self, counter: torch.Tensor, tiles: int) -> None:
        """Hold what sends until a kernel has stored so many tiles of a chunk. Of a kernel that has been launched: what stood
        before it in its hardware queue would wait for good."""

    @abstractmethod
    def mark(self) -> int:
        """What the caller has computed so far, for `send_after`: until MOST_MARKED marks later."""

    @abstractmethod
    def send_after(self, mark: int) -> None:
        """Let what is sent from now on leave after what is marked."""

    def send_after_this(self) -> None:
        """Let what is sent from now on leave after what the caller has computed so far."""
        self.send_after(self.mark())

    @abstractmethod
    def start_exchange(
        self, call: NodeCall, exchanged: SendRecv, source: torch.Tensor, make: Callable[[], None] | None = None,
        buffer: torch.Tensor | None = None,
    ) -> Exchange:  # fmt: skip
        """Start to send `source`, and to receive, after what was started before.

        make: fills `source`, in the order of what is sent. buffer: where to receive what is for another rank, once all that
        `arrive` was called for is passed on; None: in its place in the own slot.
        """

    @abstractmethod
    def arrive(
        self, call: NodeCall, exchanged: SendRecv, exchange: Exchange, buffer: torch.Tensor | None = None
    ) -> None:
        """Let an exchange arrive. After it its chunk has a signal (rule 1: data first), and is passed on inside the node.
        buffer: as for `start_exchange`; who reads what came there compares its word."""

    @abstractmethod
    def add(
        self, call: NodeCall, own: torch.Tensor, received: torch.Tensor, order: list[int], y: torch.Tensor, sms: int = 0
    ) -> None:
        """y = own [rows, N] + received [W, rows, N] of the blocks in `order`, in that order, summed in fp32. They are here.

        sms: that it may hold; 0: all, with the same bits.
        """

    @abstractmethod
    def barrier(self, call: NodeCall, topology: Topology) -> None:
        """Tell all rail peers that this rank has come: chunk 0 of its block, without data."""


class Worker:
    """A daemon thread that runs what it is given, in that order, and skips the rest after a failure."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending = 0
        self._error: Exception | None = None
        self._idle = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=f"overlap_train {name} between nodes", daemon=True)
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


class HostEngine(HostCopyEngine, InterNodeEngine):
    """The engine of CPU processes. What the caller has computed is there, so nothing has to be ordered after it."""

    network: GlooTransport

    def __init__(self, timeout_s: float, network: GlooTransport, fault: FaultRecord) -> None:
        HostCopyEngine.__init__(self, timeout_s)
        InterNodeEngine.__init__(self)
        self.network, self._fault = network, fault
        self.sending, self.arriving = Worker("sending"), Worker("arriving")

    def push_counted(self, source: torch.Tensor, routes: list[Route]) -> None:
        self.push(source, routes)

    def wait_for_tiles(self, counter: torch.Tensor, tiles: int) -> None:
        """An interpreted kernel has stored them all when it returns."""

    def mark(self) -> int:
        return 0

    def send_after(self, mark: int) -> None: ...

    def start_exchange(
        self, call: NodeCall, exchanged: SendRecv, source: torch.Tensor, make: Callable[[], None] | None = None,
        buffer: torch.Tensor | None = None,
    ) -> Exchange:  # fmt: skip
        put = partial(self.network.put, source, call.place(exchanged.sent), call.word)
        if make is None:
            put()  # gloo returns at once
        else:
            self.sending.run(partial(_one_after_the_other, make, put))
        return Put()

    def arrive(
        self, call: NodeCall, exchanged: SendRecv, exchange: Exchange, buffer: torch.Tensor | None = None
    ) -> None:
        if exchanged.passes_on:
            self.arriving.run(partial(self._pass_on, call, exchanged))

    def _pass_on(self, call: NodeCall, exchanged: SendRecv) -> None:
        call.wait_chunk(exchanged.received.fills, exchanged.received.chunk)
        for route in call.routes(exchanged.passed_on):
            run_push(route.push(call.blocks))

    def add(
        self, call: NodeCall, own: torch.Tensor, received: torch.Tensor, order: list[int], y: torch.Tensor, sms: int = 0
    ) -> None:
        total = own.to(torch.float32, copy=True)
        for block in order:
            total += received[block]
        y.copy_(total)

    def barrier(self, call: NodeCall, topology: Topology) -> None:
        nothing = torch.empty(0, dtype=torch.uint8)
        for node in range(topology.nodes):
            if node != topology.node:
                self.network.put(nothing, call.place_of(topology.twin(node), topology.rank, 0), call.word)

    def begin_ahead(self) -> None:
        self.finish_started()
        super().begin_ahead()

    def join(self) -> None:
        is_ahead = self._ahead is not None  # what has been started since is the next operator's
        try:
            with ExitStack() as all_of_it:
                for ended in (self.arriving.join, self.sending.join, super().join):
                    all_of_it.callback(ended)
                if not is_ahead:
                    self.finish_started()
            if not self._fault.failed:  # else what is under way may never arrive
                self.network.join()
        except OverlapTimeoutError as error:  # of a send: by `sending`, or under way
            self._fault.keep(error)

    def close(self) -> None:
        for worker in (self.sending, self.arriving):
            worker.close()
        self.network.close(orderly=not self._fault.failed)
        super().close()


def _one_after_the_other(*tasks: Callable[[], None]) -> None:
    for task in tasks:
        task()


class StreamEngine(StreamCopyEngine, InterNodeEngine):
    """The engines of GPUs: a stream each for what is sent and for what arrives."""

    network: NcclTransport | NvshmemPuts

    def __init__(
        self, device: torch.device, driver: CudaDriver, network: NcclTransport | NvshmemPuts, fault: FaultRecord,
        blas: Blas | None = None, reduce_sms: int = 0, gbs: float = 0.0,
    ) -> None:  # fmt: skip
        StreamCopyEngine.__init__(self, device, driver)
        InterNodeEngine.__init__(self)
        self.network, self._fault, self._blas, self.reduce_sms, self.gbs = network, fault, blas, reduce_sms, gbs
        self._sending, self._arriving = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self._ordered, self._ends = driver.new_event(), (driver.new_event(), driver.new_event())
        self._products = cycle([driver.new_event() for _ in range(MOST_MARKED)])

    def products(self, spared_sms: int) -> AbstractContextManager[None]:
        return nullcontext() if self._blas is None else self._blas.sparing(spared_sms)

    def push_counted(self, source: torch.Tensor, routes: list[Route]) -> None:
        self._enqueue(source, routes)

    def wait_for_tiles(self, counter: torch.Tensor, tiles: int) -> None:
        stream = self._driver.current_stream()
        self._driver.check(self._driver.wait_value(stream, counter.data_ptr(), tiles, AT_LEAST))

    def mark(self) -> int:
        mark = next(self._products)
        self._driver.check(self._driver.record_event(mark, self._driver.current_stream()))
        return mark

    def send_after(self, mark: int) -> None:
        self._driver.check(self._driver.wait_event(self._sending.cuda_stream, mark, 0))

    def _pass_on(self, routes: list[Route], source: torch.Tensor) -> None:
        start, stream = source.data_ptr(), self._arriving.cuda_stream
        for route in routes:
            self._driver.check(self._driver.copy(route.place, start + route.offset, route.nbytes, stream))
            self._driver.check(self._driver.copy(route.signal_at, route.epoch_at, 8, stream))

    def add(
        self, call: NodeCall, own: torch.Tensor, received: torch.Tensor, order: list[int], y: torch.Tensor, sms: int = 0
    ) -> None:
        add_blocks(call, own, received, order, y, sms)

    def barrier(self, call: NodeCall, topology: Topology) -> None:
        """And let their words arrive."""
        nothing = call.blocks.flatten()[:0]
        turns = send_recvs(GATHER, topology, chunks=1)
        self.send_after_this()
        exchanges = [self.start_exchange(call, turn, nothing) for turn in turns]
        for turn, exchange in zip(turns, exchanges, strict=True):
            self.arrive(call, replace(turn, passed_on=Legs(())), exchange)

    def begin_ahead(self) -> None:
        """Begin the next operator, once the running one's exchanges are all enqueued: before the next one is sent, its slot may
        have to be waited for, and with one hardware queue what comes after that wait would never start."""
        self.finish_started()
        for end, stream in zip(self._ends, (self._sending, self._arriving), strict=True):
            self._driver.check(self._driver.record_event(end, stream.cuda_stream))
        super().begin_ahead()

    def join(self) -> None:
        current = self._driver.current_stream()
        if self._ahead is not None:  # what has been enqueued since is the next operator's
            for end in self._ends:
                self._driver.check(self._driver.wait_event(current, end, 0))
        else:
            self.finish_started()
            if self._held:
                for stream in (self._sending, self._arriving):
                    self._order(stream.cuda_stream, current)
        super().join()

    def _order(self, first: int, second: int) -> None:
        """What comes in stream `second` runs after what is in stream `first`."""
        failed = self._driver.record_event(self._ordered, first)
        self._driver.check(self._driver.wait_event(second, self._ordered, 0) or failed)

    def close(self) -> None:
        if self._fault.failed:
            self.network.close(orderly=False)  # or the streams would never end
        for stream in (self._sending, self._arriving):
            stream.synchronize()
        super().close()
        self.network.close(orderly=True)


class NcclEngine(StreamEngine):
    """The engine of GPUs whose data cross the network by NCCL: rail peers exchange, and both take part."""

    needs_buffers = True
    network: NcclTransport

    def start_exchange(
        self, call: NodeCall, exchanged: SendRecv, source: torch.Tensor, make: Callable[[], None] | None = None,
        buffer: torch.Tensor | None = None,
    ) -> Exchange:  # fmt: skip
        received = exchanged.received
        into = call.chunk_of(received.fills, received.chunk) if buffer is None else buffer
        self._held.append(source)
        if buffer is not None:
            self._held.append(buffer)
            self._order(self._arriving.cuda_stream, self._sending.cuda_stream)
        with self._driver.in_stream(self._sending):
            if make is not None:
                make()
            sent, expected = Piece(source, call.slot.epoch), Piece(into, call.crossed(received))
            return self.network.exchange(exchanged, sent, expected)

    def arrive(
        self, call: NodeCall, exchanged: SendRecv, exchange: Exchange, buffer: torch.Tensor | None = None
    ) -> None:
        received, passed_on = exchanged.received, exchanged.passed_on
        with self._driver.in_stream(self._arriving):
            exchange.arrive()
            if buffer is None:
                self._signal(call, received)
                if not passed_on.all:
                    return
                # Bounded, and it notices a rail peer that is in another call.
                call.wait_chunk(received.fills, received.chunk)
            self._pass_on(call.routes(passed_on), call.blocks if buffer is None else buffer)

    def _signal(self, call: NodeCall, received: Leg) -> None:
        signal, word = call.signal_of(received.fills, received.chunk), call.crossed(received)
        self._driver.check(self._driver.copy(signal.data_ptr(), word.data_ptr(), 8, self._arriving.cuda_stream))


class NvshmemEngine(StreamEngine):
    """The engine of GPUs whose data cross the network by NVSHMEM: only the sender acts."""

    network: NvshmemPuts

    def send_after(self, mark: int) -> None:
        """Let what is sent or passed on from now on come after what is marked. If the arriving stream looked for a piece before
        the call's epoch has begun, the epoch before would make it seem to be there. An exchange of NCCL needs no such order:
        what it sends orders it."""
        super().send_after(mark)
        self._driver.check(self._driver.wait_event(self._arriving.cuda_stream, mark, 0))

    def start_exchange(
        self, call: NodeCall, exchanged: SendRecv, source: torch.Tensor, make: Callable[[], None] | None = None,
        buffer: torch.Tensor | None = None,
    ) -> Exchange:  # fmt: skip
        self._held.append(source)
        with self._driver.in_stream(self._sending):
            if make is not None:
                make()
            self.network.put(source, call.place(exchanged.sent), call.word, self._sending.cuda_stream)
        return Put()

    def arrive(
        self, call: NodeCall, exchanged: SendRecv, exchange: Exchange, buffer: torch.Tensor | None = None
    ) -> None:
        received = exchanged.received
        if exchanged.passes_on:
            with self._driver.in_stream(self._arriving):
                call.wait_chunk(
                    received.fills, received.chunk
                )  # bounded, and it notices a peer that is in another call
                self._pass_on(call.routes(exchanged.passed_on), call.blocks)


def add_blocks(
    call: NodeCall, own: torch.Tensor, received: torch.Tensor, order: list[int], y: torch.Tensor, sms: int = 0
) -> None:
    """InterNodeEngine.add on a GPU."""
    values = (own.data_ptr(), y.data_ptr())
    key = ("add", tuple(order), received.data_ptr(), aligned(*values), sms)
    call.launches.run(key, values, partial(_add_launch, call, own, received, order, y, sms))


def _add_launch(
    call: NodeCall, own: torch.Tensor, received: torch.Tensor, order: list[int], y: torch.Tensor, sms: int
) -> Launch:
    from ..kernels.add_blocks import WARPS, add_blocks_kernel

    programs, block = grid_of(own, len(order), sms)
    arguments = dict(
        own_ptr=own, received_ptr=received, order_ptr=call.order(tuple(order)), y_ptr=y, size=own.numel(),
        pitch=received.stride(0), abort_ptr=call.abort,
    )  # fmt: skip
    constants = dict(COUNT=len(order), BLOCK=block, num_warps=WARPS)
    return Launch(add_blocks_kernel, (programs,), arguments, constants, (("own_ptr",), ("y_ptr",)))
