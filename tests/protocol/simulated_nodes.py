"""Ranks with simulated GPUs on several nodes, and NCCL between rail peers: the real `StreamEngine` under the scheduler.

An exchange is a kernel in a stream of its own: it starts when what the sending stream was given before is done, and spins until
the rail peers that it sends to and receives from have come to the exchange of the same number. What it brings comes in any order:
here the word before the data. Twins that start their exchanges in different order are found.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import overlap_train.nodes  # noqa: F401  # before a fault is planted in what it imports
from tests.protocol.interleaving import Scheduler
from tests.protocol.simulated_blas import NETWORK_SMS, SimulatedBlas
from tests.protocol.simulated_gpu import Operation, SimulatedDriver, SimulatedGpu
from tests.protocol.simulated_ranks import SimulatedDomain, SimulatedHeap, core
from tests.protocol.simulated_streams import StreamSimulation

Posted = dict[tuple[int, int], "Post"]  # by rank and number
Pieces = list[tuple[torch.Tensor, torch.Tensor]]  # see pieces_of


@dataclass(frozen=True)
class NodeSimulation(StreamSimulation):
    """world_size ranks, node_ranks in each node. chunks: of a block. puts:
    NVSHMEM is between the nodes instead of NCCL, and holds no SMs. send_sms, reduce_sms: of every plan. method: of problems that
    are not told one."""

    node_ranks: int = 1
    chunks: int = 2
    puts: bool = False
    send_sms: int = NETWORK_SMS
    reduce_sms: int = 0
    method: str = "chunked"
    posted: Posted = field(default_factory=dict)
    heaps: dict[int, torch.Tensor] = field(default_factory=dict)  # by rank, with room for what is put
    blas: SimulatedBlas = field(default_factory=SimulatedBlas)

    def topology(self, rank: int) -> Any:
        return core("schedule.order").Topology(self.world_size // self.node_ranks, self.node_ranks, rank)

    def ranks(self, scheduler: Scheduler) -> list[SimulatedDomain]:
        self.posted.clear()
        self.heaps.clear()
        return super().ranks(scheduler)

    def patch(self, scheduler: Scheduler) -> None:
        super().patch(scheduler)
        self.blas.patch(scheduler)

    def enqueued(self, rank: int, operation: Operation) -> Operation:
        return self.blas.enqueued(rank, operation)

    def domain(self, scheduler: Scheduler, heap: SimulatedHeap, layout: Any, rank: int) -> SimulatedDomain:
        return NodeDomain(self, scheduler, heap, layout, rank)

    def engine(self, scheduler: Scheduler, rank: int) -> Any:
        """The real engine on simulated side streams."""
        gpu = self.new_gpu(scheduler, rank)
        driver = SimulatedDriver(gpu)
        fault = SimpleNamespace(failed=False)
        network: Any = SimulatedNccl(gpu, driver, self.topology(rank), self.posted, self.blas)
        if self.puts:
            network = core("nodes.nvshmem").NvshmemPuts(driver, SimulatedNvshmem(gpu, driver, self.heaps, rank))
        with mock.patch.object(torch.cuda, "Stream", gpu.new_stream):
            return core("nodes.engines").StreamEngine(
                torch.device("cpu"), driver, network, fault, self.blas.of_a_rank()
            )

    def new_gpu(self, scheduler: Scheduler, rank: int) -> SimulatedGpu:
        """That of a rank, with the streams of another group's engine if it has one."""
        self.gpus[rank] = SimulatedGpu(scheduler, rank, self.one_queue)
        return self.gpus[rank]


class NodeDomain(SimulatedDomain):
    """Waits by kernels, as on GPUs."""

    def __init__(
        self, simulation: NodeSimulation, scheduler: Scheduler, heap: SimulatedHeap, layout: Any, rank: int
    ) -> None:
        super().__init__(simulation, scheduler, heap, layout, rank)
        self.topology, self._simulation = simulation.topology(rank), simulation
        waits = core("nodes.connect").NodeWaits(self.topology, simulation.timeout_s, self.fault, self.engine, None)
        waits.wait, waits.wait_chunk = waits.on_stream, waits.chunk_on_stream
        waits.next_epoch = core("group.waits").next_epoch_on_stream
        self.workspace = core("nodes.connect").NodeWorkspace(heap, layout, self.device, waits)
        self.span = core("nodes").SeveralNodes(self)
        simulation.heaps[rank] = memory = heap.view(rank)
        if simulation.puts:
            self.engine.network.attach(memory, layout.nbytes)

    def plan(
        self, method: str, x: torch.Tensor, w: torch.Tensor, spec: str = "ALL_GATHER_LINEAR", variant: Any = None,
        **settings: Any,
    ) -> Any:  # fmt: skip
        """variant: across nodes a method runs in one way."""
        planning, config = core("ops.plan"), core("config").OverlapConfig(method=method, **settings)
        table, spec = core("select.table").UNTUNED, getattr(core("ops.spec"), spec)
        plan = planning.make_plan(spec, config, table, self.topology, x, w)
        return replace(
            plan, **{part: self._in_chunks(getattr(plan, part)) for part in ("fprop", "dgrad", "dgrad_alone")}
        )

    def _in_chunks(self, engine: Any) -> Any:
        """On the CPU plans have numbers of chunks of their own, and nothing holds SMs."""
        chunks = self._simulation.chunks
        of_kind = (engine.kind, self.topology, chunks, engine.method == "fused")
        return replace(
            engine,
            chunks=chunks,
            transfers=core("schedule.order").transfers_of(*of_kind),
            send_recvs=core("schedule.inter_node").send_recvs(*of_kind),
            send_sms=0 if self._simulation.puts else self._simulation.send_sms,
            reduce_sms=self._simulation.reduce_sms,
        )


@dataclass
class Post:
    """What a rank has on offer in one exchange. taken: its target has it."""

    target: int
    pieces: list[torch.Tensor]
    taken: bool = False


class SimulatedNccl:
    """An NcclTransport of one rank, which is connected with its rail peers. posted, blas: of all ranks."""

    needs_buffers = True

    def __init__(
        self, gpu: SimulatedGpu, driver: SimulatedDriver, topology: Any, posted: Posted, blas: SimulatedBlas
    ) -> None:
        self._gpu, self._driver, self._topology, self._posted, self._blas = gpu, driver, topology, posted, blas
        self._stream, self._event, self._number = gpu.new_stream(), driver.new_event(), 0

    def start(self, exchange: Any) -> None:
        exchange.work = self.exchange(exchange.exchanged, core("nodes.nccl").pieces_of(exchange))

    def exchange(self, crossing: Any, pieces: Pieces) -> SimulatedExchange:
        self._number += 1
        self._driver.record_event(self._event, self._driver.current_stream())
        self._driver.wait_event(self._stream.cuda_stream, self._event, 0)
        run: Callable[[], None] = partial(self._run, self._number, crossing, pieces)
        operation = Operation(f"exchange {self._number}", run)
        self._stream.enqueue(operation)
        return SimulatedExchange(self._gpu, operation)

    def _run(self, number: int, crossing: Any, pieces: Pieces) -> None:
        rank, source, scheduler = self._topology.rank, crossing.received.source, self._gpu.scheduler
        taker = self._topology.receiver(crossing.sent.target)
        (data, into_data), (word, into_word) = pieces
        mine = self._posted[rank, number] = Post(taker, [word, data])
        self._blas.crossing[self._gpu.rank] += 1
        scheduler.wait_until(lambda: (source, number) in self._posted, f"rank {source} to come to exchange {number}")
        theirs = self._posted[source, number]
        assert theirs.target == rank, f"exchange {number} of rank {source} goes to {theirs.target}"
        for piece, into in zip(theirs.pieces, [into_word, into_data], strict=True):
            assert piece.numel() == into.numel(), (
                f"rank {source} sends {piece.numel()} elements, {into.numel()} are expected"
            )
            _move(scheduler, piece, into)
        theirs.taken = True
        scheduler.step()
        scheduler.wait_until(lambda: mine.taken, f"rank {mine.target} to take exchange {number}")
        self._blas.crossing[self._gpu.rank] -= 1

    def close(self, orderly: bool) -> None:
        pass


class SimulatedNvshmem:
    """NVSHMEM's bindings of `rank`: a put is on its way when it has left its stream, and the signal comes after the data. heaps:
    of all ranks, which addresses in the own one stand for."""

    Signal_op = SimpleNamespace(SIGNAL_SET=9)

    def __init__(self, gpu: SimulatedGpu, driver: SimulatedDriver, heaps: dict[int, torch.Tensor], rank: int) -> None:
        self._gpu, self._driver, self._heaps, self._rank = gpu, driver, heaps, rank
        self._wire, self._left = gpu.new_stream(), driver.new_event()

    def putmem_signal_on_stream(
        self, data: int, source: int, nbytes: int, signal: int, word: int, how: int, rank: int, stream: int
    ) -> None:
        """The source may be written over when the stream goes on; then the data may still be on their way."""
        sent, there = ctypes.create_string_buffer(nbytes), self._there(data, rank)
        at = ctypes.addressof(sent)
        self._gpu.streams[stream].enqueue(Operation("put", lambda: _copy(self._gpu.scheduler, source, at, nbytes)))
        self._deliver(stream, lambda: _copy(self._gpu.scheduler, at, there.data_ptr(), len(sent)))
        self._tell(signal, word, how, rank)

    def signal_op_on_stream(self, signal: int, word: int, how: int, rank: int, stream: int) -> None:
        self._deliver(stream, lambda: None)
        self._tell(signal, word, how, rank)

    def _tell(self, signal: int, word: int, how: int, rank: int) -> None:
        assert how == self.Signal_op.SIGNAL_SET
        there = self._there(signal, rank)[:8].view(torch.int64)
        signed = word - (1 << 64) if word >> 63 else word
        self._wire.enqueue(Operation("signal", lambda: there.fill_(signed)))

    def _deliver(self, stream: int, deliver: Callable[[], None]) -> None:
        """On the wire, when `stream` has come so far."""
        self._driver.record_event(self._left, stream)
        self._driver.wait_event(self._wire.cuda_stream, self._left, 0)
        self._wire.enqueue(Operation("deliver", deliver))

    def _there(self, address: int, rank: int) -> torch.Tensor:
        return self._heaps[rank][address - self._heaps[self._rank].data_ptr() :]


class SimulatedExchange:
    """See Exchange."""

    def __init__(self, gpu: SimulatedGpu, operation: Operation) -> None:
        self._gpu, self._operation = gpu, operation

    def arrive(self) -> None:
        done = self._operation
        self._gpu.current.enqueue(Operation(f"wait for {done.name}", lambda: None, lambda: done.done))


def _move(scheduler: Scheduler, source: torch.Tensor, target: torch.Tensor) -> None:
    _copy(scheduler, source.data_ptr(), target.data_ptr(), source.numel() * source.element_size())


def _copy(scheduler: Scheduler, source: int, target: int, nbytes: int) -> None:
    """From one address to another. Others may run in the middle."""
    half = nbytes // 2 if nbytes > 8 else 0
    for start, end in ((0, half), (half, nbytes)):
        scheduler.step()
        ctypes.memmove(target + start, source + start, end - start)
