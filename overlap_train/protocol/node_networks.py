"""The two ways in which something crosses the network between GPUs of several nodes (node_streams.py).

    by exchanges    NCCL: a send to one twin and a receive from another, as one group. It writes into the memory of its own rank
                    only. What is for another rank of the node is received beside the slot, and the arriving stream copies it
                    there: data, then the sender's word
    by puts         NVSHMEM: data, then their signal, straight into the memory of the rank that they are for. Nobody has to say
                    what it expects, and nothing lands

The operators enqueue the same steps for both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..planning.schedule.crossings import Crossing
from ..planning.schedule.legs import Leg
from ..symmetric.inter_node import Exchange, Piece
from ..symmetric.nccl import NcclTransport
from ..symmetric.puts import NvshmemPuts
from .node_slot import NodeCall
from .node_streams import NodeStreamEngine


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
