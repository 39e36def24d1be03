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
from .messages import Messages
from .routing import Routing

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
        dist.all_to_all_single(received, sent, routing.received, routing.sent, group=group)
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
        self._rank, self._plan, self._routing = domain.rank, plan, routing
        has_numbers, features = numbers is not None, x.shape[1]
        self._messages = messages = Messages(domain, tag, routing.sent, routing.received, x, features, has_numbers)
        self.rows = x.new_empty(routing.rows_received, features)
        tokens, of_ranks = routing.tokens.split(routing.sent), None
        if numbers is not None:
            self.numbers, of_ranks = numbers.new_empty(routing.rows_received), numbers.split(routing.sent)
        for peer in (*messages.call.peers, domain.rank):
            rows, places = messages.leaving(peer)
            torch.index_select(x, 0, tokens[peer], out=rows)
            if of_ranks is not None:
                places.copy_(of_ranks[peer])
            messages.send(peer)

    def matmul(self, product: GroupedProduct) -> torch.Tensor:
        y = self.rows.new_empty(len(self.rows), product.features)
        self._take(lambda source, rows: product.into(y, self._routing.places[source], rows))
        return y

    def receive(self) -> None:
        self._take(lambda source, rows: None)

    def _take(self, multiply: Callable[[int, torch.Tensor], None]) -> None:
        """Wait for one source after the other, multiply its rows and keep them."""
        for source in (self._rank, *self._plan.sources):
            if source != self._rank:
                self._messages.call.wait(source)
            rows, numbers = self._messages.arriving(source)
            multiply(source, rows)
            place = self._routing.places[source].index
            self.rows.index_copy_(0, place, rows)
            if self.numbers is not None:
                self.numbers.index_copy_(0, place, numbers)


METHODS: dict[str, Callable[..., DispatchGemm]] = {
    "collective": CollectiveDispatchGemm,
    "chunked": ChunkedDispatchGemm,
}
