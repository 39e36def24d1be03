"""What moves data in a group that spans nodes: the copy engine inside the node, and a transport between nodes.

    sending     adds up partial sums, where there are any, and starts what goes to other nodes, in order
    arriving    waits for what has come from other nodes, and passes it on inside the node

These two are streams on GPUs (StreamEngine); in CPU processes the caller does both (HostEngine). Nothing else waits for the
network but the products that need it, and they as inside a node. The operators enqueue the same steps for every engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ..gpu.driver import Blas, CudaDriver, Word
from ..gpu.launch import Launch
from ..group.copy_engine import AT_LEAST, CopyEngine, Route, StreamCopyEngine
from ..group.signals import FaultRecord
from ..ops.launch import aligned
from ..ranks.agreement import Agreement, on_all_ranks
from ..schedule.inter_node import SendRecv, send_recvs
from ..schedule.kinds import Kind
from ..schedule.order import Topology, Transfers
from .slots import NodeCall

if TYPE_CHECKING:
    from .exchanges import Exchanges

T = TypeVar("T")
CONNECT = "overlap_train: connect the nodes of the group"  # what ranks do while a transport is made, for errors

MOST_MARKED = 3  # products that are enqueued before what sends them: at most two, and the one that is sent next


@dataclass
class Exchange:
    """A piece that is sent, and one that is received. make: fills `source`. buffer: where to receive what is for another rank of
    this node, once all that `arrive` was called for is passed on; else it comes to its place. work: what a transport returned."""

    call: NodeCall
    exchanged: SendRecv
    source: torch.Tensor
    make: Callable[[], None] | None = None
    buffer: torch.Tensor | None = None
    work: Any = None


def connect_rail_peers(
    agreement: Agreement,
    topology: Topology,
    library: str,
    connect: Callable[[dist.Store], T],
    end: Callable[[T], object],
) -> T:
    """What `connect` makes of a store that this rank shares with its rail peers; on all ranks, or it is ended. Collective."""
    agreement.barrier(CONNECT)  # counted in the name of the store: ranks that try again meet in a new one
    # Of no other group: one that could not be connected has left its addresses behind.
    store = agreement.store_of(agreement.name_of(f"network/{topology.rank % topology.local}"))

    def make() -> T:
        try:
            return connect(store)
        except Exception as failure:
            first = str(failure).splitlines()[0]
            setting = f"{library.upper()}_SOCKET_IFNAME"
            raise RuntimeError(
                f"{library} could not connect it with its peers in other nodes ({first}); see {setting}"
            ) from failure

    return on_all_ranks(make, agreement, CONNECT, end)


def add_blocks(
    call: NodeCall, own: torch.Tensor, received: torch.Tensor, order: list[int], y: torch.Tensor, sms: int = 0
) -> None:
    """y = own [rows, N] + received [W, rows, N] of the blocks in `order`, in that order, summed in fp32. sms: that
    it may hold; 0: all, with the same bits."""
    values = (own.data_ptr(), y.data_ptr())
    key = ("add", tuple(order), received.data_ptr(), aligned(*values), sms)
    call.launches.run(key, values, _add_launch, call, own, received, order, y, sms)


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


def grid_of(own: torch.Tensor, count: int, sms: int) -> tuple[int, int]:
    """(programs, BLOCK) of add_blocks_kernel for `count` blocks like `own`. sms: that it may hold, one a program; 0: all."""
    from ..kernels.add_blocks import MOST_OF_64_KIB, ON_ALL_SMS, ON_FEW_SMS

    size, nbytes = own.numel(), ON_FEW_SMS if sms and count <= MOST_OF_64_KIB else ON_ALL_SMS
    block = min(nbytes // own.element_size(), 1 << (size - 1).bit_length())
    tiles = -(-size // block)
    return min(sms or tiles, tiles), block


class InterNodeEngine(CopyEngine, ABC):
    """A copy engine whose operators end when what goes to other nodes has left, and what comes has arrived and is passed on.

    network: carries exchanges between this rank and its rail peers. Where it needs_buffers, what is for another rank of this node
    comes into a receive buffer, out of which the engine copies data, then the sender's word. Else a piece, then its signal, go
    into the heap of the rank that they are for.
    """

    network: Any
    add = staticmethod(add_blocks)
    _sending: Any = None  # streams
    _arriving: Any = None

    def __init__(self) -> None:
        self._unfinished: list[Exchanges] = []

    def at_end(self, call: Exchanges) -> None:
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

    def products(self, sm_margin: int) -> AbstractContextManager[None]:
        """Scope of library products that run beside the network's kernels."""
        return nullcontext()

    def push_counted(self, source: torch.Tensor, routes: list[Route]) -> None:
        """Enqueue pushes of what a kernel that has been launched writes into `source`, each after its counter."""
        self.push(source, routes)

    def wait_for_tiles(self, counter: torch.Tensor, tiles: int) -> None:
        """Hold what sends until a kernel, which has been launched, has stored so many tiles of a chunk."""

    def mark(self) -> Any:
        """What the caller has computed so far, for `send_after`: until MOST_MARKED marks later."""
        return 0

    def send_after(self, mark: Any) -> None:
        """Let what is sent from now on leave after what is marked."""

    def send_after_this(self) -> None:
        """Let what is sent from now on leave after what the caller has computed so far."""
        self.send_after(self.mark())

    def start_exchange(self, exchange: Exchange) -> None:
        """Start to send, and to receive, after what was started before."""
        with self._in(self._sending):
            if exchange.make is not None:
                exchange.make()
            self.network.start(exchange)

    def arrive(self, exchange: Exchange) -> None:
        """Let its data arrive. After them its chunk has a signal (rule 1: data first), and is passed on in the node. Who reads
        what came into a buffer compares its word."""
        call, exchanged = exchange.call, exchange.exchanged
        with self._in(self._arriving):
            self._come(exchange)
            if exchange.buffer is not None:
                self._pass_on(call.routes(exchanged.passed_on), exchange.buffer)
            elif exchanged.passes_on:
                # Bounded, and it notices a rail peer that is in another call.
                call.wait_chunk(exchanged.received.fills, exchanged.received.chunk)
                self._pass_on(call.routes(exchanged.passed_on), call.blocks)

    @abstractmethod
    def _in(self, stream: Any) -> AbstractContextManager[None]:
        """Scope in which `stream` is the current one."""

    def _come(self, exchange: Exchange) -> None:
        """Hold the current stream until what a transport has brought beside the slot is there, and give it its signal."""

    @abstractmethod
    def _pass_on(self, routes: list[Route], source: torch.Tensor) -> None:
        """Copy what is here to other ranks of the node, each piece before its signal."""

    def barrier(self, call: NodeCall, topology: Topology) -> None:
        """Tell all rail peers that this rank has come: chunk 0 of its block, without data; and let their words arrive."""
        nothing = call.blocks.flatten()[:0]
        turns = [replace(turn, passed_on=Transfers(())) for turn in send_recvs(Kind.AG_GEMM, topology, chunks=1)]
        self.send_after_this()
        exchanges = [Exchange(call, turn, nothing) for turn in turns]
        for step in (self.start_exchange, self.arrive):
            for exchange in exchanges:
                step(exchange)


class StreamEngine(StreamCopyEngine, InterNodeEngine):
    """The engine of GPUs: a stream each for what is sent and for what arrives."""

    def __init__(self, device: torch.device, driver: CudaDriver, network: Any, fault: FaultRecord, blas: Blas) -> None:
        StreamCopyEngine.__init__(self, device, driver)
        InterNodeEngine.__init__(self)
        self.network, self._fault, self._blas = network, fault, blas
        self._sending, self._arriving = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self._ordered, self._ends = driver.new_event(), (driver.new_event(), driver.new_event())
        self._products = cycle([driver.new_event() for _ in range(MOST_MARKED)])

    def products(self, sm_margin: int) -> AbstractContextManager[None]:
        return self._blas.sparing(sm_margin)

    def push_counted(self, source: torch.Tensor, routes: list[Route]) -> None:
        self._enqueue(source, routes)

    def wait_for_tiles(self, counter: torch.Tensor, tiles: int) -> None:
        stream = self._driver.current_stream()
        self._driver.check(self._driver.wait_value(stream, counter.data_ptr(), tiles, AT_LEAST))

    def mark(self) -> Word:
        mark = next(self._products)
        self._driver.check(self._driver.record_event(mark, self._driver.current_stream()))
        return mark

    def send_after(self, mark: Any) -> None:
        # If the arriving stream looked for a piece before the call's epoch has begun, the epoch before would make it seem to be
        # there.
        for stream in (self._sending, self._arriving):
            self._driver.check(self._driver.wait_event(stream.cuda_stream, mark, 0))

    def start_exchange(self, exchange: Exchange) -> None:
        self._held.append(exchange.source)
        if exchange.buffer is not None:
            self._held.append(exchange.buffer)
            self._order(self._arriving.cuda_stream, self._sending.cuda_stream)
        super().start_exchange(exchange)

    def _in(self, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
        return self._driver.in_stream(stream)

    def _come(self, exchange: Exchange) -> None:
        if exchange.work is None:
            return
        exchange.work.arrive()
        if exchange.buffer is None:
            received = exchange.exchanged.received
            signal, word = exchange.call.signal_of(received.fills, received.chunk), exchange.call.crossed(received)
            stream = self._arriving.cuda_stream
            self._driver.check(self._driver.copy(signal.data_ptr(), word.data_ptr(), 8, stream))

    def _pass_on(self, routes: list[Route], source: torch.Tensor) -> None:
        start, stream = source.data_ptr(), self._arriving.cuda_stream
        for route in routes:
            self._driver.check(self._driver.copy(route.place, start + route.offset, route.nbytes, stream))
            self._driver.check(self._driver.copy(route.signal_at, route.epoch_at, 8, stream))

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
