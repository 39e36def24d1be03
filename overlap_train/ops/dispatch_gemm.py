"""AllToAll + grouped GEMM: y [R, N] = (the rows that all ranks route to this rank's experts) @ w[their expert].

Each rank gathers its rows for one rank after the other, and sends them with their numbers, if there are any. The receiver
multiplies its own rows first, then those of each source in the order in which they arrive (schedule/order.py), and keeps all rows
in placed order for the weight gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..group.domain import OverlapDomain
from ..group.signals import Tag
from .grouped import GroupedProduct
from .routing import Routing, capacity_of

if TYPE_CHECKING:
    from .plan import EnginePlan


class DispatchGemm:
    """Rows on their way. x: [T, H], of this rank's tokens. numbers: fp32 [N], one for each row in sent order, or None.

    rows: [R, H], what has arrived, in placed order; numbers: fp32 [R], likewise, or None. Both are complete after `matmul` or
    `receive`.
    """

    rows: torch.Tensor
    numbers: torch.Tensor | None = None

    def matmul(self, product: GroupedProduct) -> torch.Tensor:
        """rows @ w[their expert] -> [R, N]."""
        raise NotImplementedError

    def receive(self) -> None:
        """Wait for all rows, and multiply none."""
        raise NotImplementedError


class CollectiveDispatchGemm(DispatchGemm):
    """NCCL or gloo, then one grouped GEMM."""

    def __init__(
        self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, routing: Routing, x: torch.Tensor,
        numbers: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._routing = routing
        domain.collective_calls.enter(tag)
        sent = x.index_select(0, routing.tokens)
        self.rows = self._exchanged(sent, domain.group)
        self.numbers = None if numbers is None else self._exchanged(numbers.contiguous(), domain.group)

    def _exchanged(self, sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        routing = self._routing
        received = sent.new_empty(routing.rows_received, *sent.shape[1:])
        dist.all_to_all_single(received, sent, [*routing.received], [*routing.sent], group=group)
        placed = torch.empty_like(received)
        placed[routing.place_of_received] = received
        return placed

    def matmul(self, product: GroupedProduct) -> torch.Tensor:
        y = self.rows.new_empty(len(self.rows), product.features)
        product.into(y, self._routing.all_places, self.rows)
        return y

    def receive(self) -> None:
        pass


class ChunkedDispatchGemm(DispatchGemm):
    """A grouped GEMM for each source, after a wait for it."""

    def __init__(
        self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, routing: Routing, x: torch.Tensor,
        numbers: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._domain, self._plan, self._routing = domain, plan, routing
        features, rank, counts = x.shape[1], domain.rank, routing.received
        capacity = capacity_of(domain.layout.slot_bytes, domain.world_size, features, x.dtype)
        self._call = call = domain.workspace.open(torch.Size([capacity, features]), x.dtype, tag)
        call.next_epoch()
        self.rows = x.new_empty(routing.rows_received, features)
        if numbers is not None:
            self.numbers = numbers.new_empty(routing.rows_received)
        leaving = routing.messages(routing.sent, features, x.dtype, numbers is not None)
        staging = x.new_empty(sum(message.elements for message in leaving))
        tokens = routing.tokens.split(routing.sent)
        of_rank = None if numbers is None else numbers.split(routing.sent)
        for peer in (*call.peers, rank):
            message = leaving[peer]
            if message.rows:
                torch.index_select(x, 0, tokens[peer], out=message.rows_in(staging))
                if of_rank is not None:
                    message.numbers_in(staging).copy_(of_rank[peer])
            if peer != rank:
                domain.engine.push(staging, [call.route(peer, message.begin, message.elements)])
        self._own, self._staging = leaving[rank], staging
        self._arriving = [routing.messages([count], features, x.dtype, numbers is not None)[0] for count in counts]

    def matmul(self, product: GroupedProduct) -> torch.Tensor:
        y = self.rows.new_empty(len(self.rows), product.features)
        self._take(lambda source, rows: product.into(y, self._routing.places[source], rows))
        return y

    def receive(self) -> None:
        self._take(lambda source, rows: None)

    def _take(self, multiply: Callable[[int, torch.Tensor], None]) -> None:
        """Wait for one source after the other, multiply its rows and keep them."""
        rank, call = self._domain.rank, self._call
        for source in (rank, *self._plan.sources):
            if source != rank:
                call.wait(source)
            message = self._own if source == rank else self._arriving[source]
            memory = self._staging if source == rank else call.blocks[source].view(-1)
            if not message.rows:
                continue
            rows, place = message.rows_in(memory), self._routing.places[source].index
            multiply(source, rows)
            self.rows.index_copy_(0, place, rows)
            if self.numbers is not None:
                self.numbers.index_copy_(0, place, message.numbers_in(memory))


METHODS: dict[str, Callable[..., DispatchGemm]] = {
    "collective": CollectiveDispatchGemm,
    "chunked": ChunkedDispatchGemm,
}
