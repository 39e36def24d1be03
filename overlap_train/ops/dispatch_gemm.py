"""AllToAll + grouped GEMM: y [R, N] = (the rows that all ranks route to this rank's experts) @ w[their expert].

    x             [T, H], of this rank's tokens; in fp8 packed rows (blocks.py), and so are `rows`
    numbers       fp32 [T, E], one for each token and expert, which goes with its row; or None
    keeps_rows    a weight gradient wants what has arrived

`matmul` multiplies; where y is not wanted it returns None. Complete after it: rows [R, H], in placed order, if they are kept, and
numbers, fp32 [R], likewise.

Each rank gathers its rows for one rank after the other, and sends them with their numbers, if there are any. The receiver
multiplies its own rows first, then those of each source in the order in which they arrive (schedule/order.py). By `fused` rows go
where the receiver wants them, some experts' rows of all sources after others'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..group.domain import OverlapDomain
from ..group.signals import Tag
from .grouped import BlockProduct, GroupedProduct
from .launch_experts import dispatch_and_multiply
from .messages import Messages, open_rows, placed_rows
from .routing import Routing

if TYPE_CHECKING:
    from .plan import EnginePlan


class CollectiveDispatchGemm:
    """NCCL or gloo, then one grouped GEMM."""

    def __init__(
        self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, routing: Routing, x: torch.Tensor,
        numbers: torch.Tensor | None, keeps_rows: bool,
    ) -> None:  # fmt: skip
        self._routing = routing
        domain.collective_calls.enter(tag)
        sent = x.index_select(0, routing.tokens)
        self.rows = self._exchanged(sent, domain.group)
        self.numbers = None if numbers is None else self._exchanged(_of_rows(numbers, routing), domain.group)

    def _exchanged(self, sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        routing = self._routing
        received = sent.new_empty(routing.rows_received, *sent.shape[1:])
        dist.all_to_all_single(received, sent, routing.received, routing.sent, group=group)
        placed = torch.empty_like(received)
        placed[routing.place_of_received] = received
        return placed

    def matmul(self, product: GroupedProduct | BlockProduct, is_wanted: bool = True) -> torch.Tensor | None:
        if not is_wanted:
            return None
        y = self.rows.new_empty(len(self.rows), product.features, dtype=product.dtype)
        product.into(y, self._routing.all_places, self.rows)
        return y


class ChunkedDispatchGemm:
    """A grouped GEMM for each source, after a wait for it."""

    def __init__(
        self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, routing: Routing, x: torch.Tensor,
        numbers: torch.Tensor | None, keeps_rows: bool,
    ) -> None:  # fmt: skip
        self._rank, self._plan, self._routing, self._x = domain.rank, plan, routing, x
        has_numbers, features = numbers is not None, x.shape[1]
        self._messages = messages = Messages(domain, tag, routing.sent, routing.received, x, features, has_numbers)
        self.rows = x.new_empty(routing.rows_received, features) if keeps_rows else None
        self.numbers = None if numbers is None else numbers.new_empty(routing.rows_received)
        tokens = routing.tokens.split(routing.sent)
        of_ranks = None if numbers is None else _of_rows(numbers, routing).split(routing.sent)
        for peer in (*messages.call.peers, domain.rank):
            rows, places = messages.leaving(peer)
            torch.index_select(x, 0, tokens[peer], out=rows)
            if of_ranks is not None:
                places.copy_(of_ranks[peer])
            messages.send(peer)

    def matmul(self, product: GroupedProduct | BlockProduct, is_wanted: bool = True) -> torch.Tensor | None:
        """Wait for one source after the other, multiply its rows and keep what is wanted."""
        count = self._routing.rows_received
        y = self._x.new_empty(count, product.features, dtype=product.dtype) if is_wanted else None
        for source in (self._rank, *self._plan.sources):
            if source != self._rank:
                self._messages.call.wait(source)
            rows, numbers = self._messages.arriving(source)
            places = self._routing.places[source]
            if y is not None:
                product.into(y, places, rows)
            if self.rows is not None:
                self.rows.index_copy_(0, places.index, rows)
            if self.numbers is not None:
                self.numbers.index_copy_(0, places.index, numbers)
        return y


class FusedDispatchGemm:
    """One kernel stores the rows at their places in the experts' ranks' slots, and multiplies those that have arrived."""

    def __init__(
        self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, routing: Routing, x: torch.Tensor,
        numbers: torch.Tensor | None, keeps_rows: bool,
    ) -> None:  # fmt: skip
        self._domain, self._plan, self._routing, self._x, self._keeps_rows = domain, plan, routing, x, keeps_rows
        self._call = open_rows(domain, tag, x.dtype, x.shape[1], plan.chunks)
        self.rows, self.numbers = None, numbers

    def matmul(self, product: GroupedProduct | BlockProduct, is_wanted: bool = True) -> torch.Tensor | None:
        call, count = self._call, self._routing.rows_received
        y = self._x.new_empty(count, product.features, dtype=product.dtype)
        dispatch_and_multiply(self._domain, call, self._plan, self._routing, self._x, self.numbers, product, y)
        call.wait_for_all()  # tiles have not waited for a rank without rows for them
        rows, numbers = placed_rows(call, count)
        self.rows = rows.clone() if self._keeps_rows else None
        self.numbers = None if self.numbers is None else numbers.clone()
        return y if is_wanted else None


def _of_rows(numbers: torch.Tensor, routing: Routing) -> torch.Tensor:
    """numbers, one for each token and expert, of each row in sent order."""
    return numbers.view(-1)[routing.places_of_tokens]


METHODS: dict[str, Callable[..., Any]] = {
    "collective": CollectiveDispatchGemm,
    "chunked": ChunkedDispatchGemm,
    "fused": FusedDispatchGemm,
}
