"""What moves data in a group that spans nodes: the copy engine inside the node, and what sends and receives between nodes.

    sending     adds up partial sums, where there are any, and starts what goes to other nodes, in order
    arriving    waits for what has come from other nodes, and passes it on inside the node

These two are streams on GPUs, threads of CPU processes. Nothing else waits for the network but the products that need it, and
they as inside a node. Where one hardware queue serves all streams, what stands at its head holds up the rest:
schedule/inter_node.py says what is enqueued when. The operators enqueue the same steps for every engine:

    HostEngine       CPU processes, by gloo (gloo.py): a piece, then its signal, go into the heap of the rank that they are for
    NvshmemEngine    GPUs, by NVSHMEM (nvshmem.py): the same. Nobody has to say what it expects
    NcclEngine       GPUs, by NCCL (nccl.py): a send to one rail peer and a receive from another, as one group. It writes into the
                     memory of its own rank only. What is for another rank of the node comes into a receive buffer, and the
                     arriving stream copies it on: data, then the sender's word
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any, Protocol

import torch

from ..gpu.driver import Blas, CudaDriver
from ..gpu.launch import Launch
from ..group.copy_engine import AT_LEAST, CopyEngine, Route, StreamCopyEngine
from ..group.signals import FaultRecord
from ..ops.launch import aligned
from ..schedule.inter_node import SendRecv, send_recvs
from ..schedule.kinds import Kind
from ..schedule.order import Topology, Transfers
from .slots import NodeCall

CONNECT = "overlap_train: connect the nodes of the group"  # what ranks do while a transport is made, for errors

MOST_MARKED = 3  # products that are enqueued before what sends them: at most two, and the one that is sent next


@dataclass(frozen=True)
class Piece:
    """Data, contiguous and perhaps none, and the word that becomes their signal, int64 [1]; both in memory of the GPU."""

    data: torch.Tensor
    word: torch.Tensor


class Exchange(Protocol):
    """A piece that is sent, and one that is received, under way."""

    def arrive(self) -> None:
        """Hold the current stream until the received piece is there, and until the one sent may be written over."""
        ...


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
    network: Any  # its transport

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

    def products(self, sm_margin: int) -> AbstractContextManager[None]:
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


def grid_of(own: torch.Tensor, count: int, sms: int) -> tuple[int, int]:
    """(programs, BLOCK) of add_blocks_kernel for `count` blocks like `own`. sms: that it may hold, one a program; 0: all."""
    from ..kernels.add_blocks import MOST_OF_64_KIB, ON_ALL_SMS, ON_FEW_SMS

    size, nbytes = own.numel(), ON_FEW_SMS if sms and count <= MOST_OF_64_KIB else ON_ALL_SMS
    block = min(nbytes // own.element_size(), 1 << (size - 1).bit_length())
    tiles = -(-size // block)
    return min(sms or tiles, tiles), block


class StreamEngine(StreamCopyEngine, InterNodeEngine):
    """The engines of GPUs: a stream each for what is sent and for what arrives."""

    def __init__(
        self, device: torch.device, driver: CudaDriver, network: Any, fault: FaultRecord,
        blas: Blas | None = None, reduce_sms: int = 0, gbs: float = 0.0,
    ) -> None:  # fmt: skip
        StreamCopyEngine.__init__(self, device, driver)
        InterNodeEngine.__init__(self)
        self.network, self._fault, self._blas, self.reduce_sms, self.gbs = network, fault, blas, reduce_sms, gbs
        self._sending, self._arriving = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self._ordered, self._ends = driver.new_event(), (driver.new_event(), driver.new_event())
        self._products = cycle([driver.new_event() for _ in range(MOST_MARKED)])

    add = staticmethod(add_blocks)

    def products(self, sm_margin: int) -> AbstractContextManager[None]:
        return nullcontext() if self._blas is None else self._blas.sparing(sm_margin)

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

    def start_exchange(
        self, call: NodeCall, exchanged: SendRecv, source: torch.Tensor, make: Callable[[], None] | None = None,
        buffer: torch.Tensor | None = None,
    ) -> Exchange:  # fmt: skip
        self._held.append(source)
        if buffer is not None:
            self._held.append(buffer)
            self._order(self._arriving.cuda_stream, self._sending.cuda_stream)
        with self._driver.in_stream(self._sending):
            if make is not None:
                make()
            return self._send(call, exchanged, source, buffer)

    @abstractmethod
    def _send(self, call: NodeCall, exchanged: SendRecv, source: torch.Tensor, buffer: torch.Tensor | None) -> Exchange:
        """Enqueue an exchange in the current stream."""

    def _pass_on(self, routes: list[Route], source: torch.Tensor) -> None:
        start, stream = source.data_ptr(), self._arriving.cuda_stream
        for route in routes:
            self._driver.check(self._driver.copy(route.place, start + route.offset, route.nbytes, stream))
            self._driver.check(self._driver.copy(route.signal_at, route.epoch_at, 8, stream))

    def barrier(self, call: NodeCall, topology: Topology) -> None:
        """And let their words arrive."""
        nothing = call.blocks.flatten()[:0]
        turns = send_recvs(Kind.AG_GEMM, topology, chunks=1)
        self.send_after_this()
        exchanges = [self.start_exchange(call, turn, nothing) for turn in turns]
        for turn, exchange in zip(turns, exchanges, strict=True):
            self.arrive(call, replace(turn, passed_on=Transfers(())), exchange)

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
