"""Grouped GEMM + AllToAll: y [T, N] = the sum of each token's rows of a [R, K] @ w[their expert].

    a          [R, K] in placed order; in fp8 packed rows (blocks.py)
    numbers    fp32 [R], one for each row, or None; they go with it

`finish` waits for all. Complete after it: numbers, fp32 [N], those that have come back, in sent order.

The rows for one rank after the other are multiplied and sent as they are done, the own ones last. The receiver adds each token's
rows in order of expert, in fp32, whatever came first: the same bits on every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..group.domain import OverlapDomain
from ..group.signals import Tag
from .grouped import BlockProduct, GroupedProduct
from .launch_experts import multiply_and_combine
from .messages import Messages, open_rows, placed_rows
from .routing import Routing

if TYPE_CHECKING:
    from .plan import EnginePlan


class CollectiveGemmCombine:
    """One grouped GEMM, then NCCL or gloo."""

    def __init__(
        self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, routing: Routing, a: torch.Tensor,
        product: GroupedProduct | BlockProduct, numbers: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._routing = routing
        domain.collective_calls.enter(tag)
        y = a.new_empty(len(a), product.features, dtype=product.dtype)
        product.into(y, routing.all_places, a)
        self._rows = self._exchanged(y, domain.group)
        self.numbers = None if numbers is None else self._exchanged(numbers, domain.group)

    def _exchanged(self, placed: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        routing = self._routing
        sent = placed.index_select(0, routing.place_of_received)
        received = placed.new_empty(routing.rows_sent, *placed.shape[1:])
        dist.all_to_all_single(received, sent, routing.sent, routing.received, group=group)
        return received

    def finish(self) -> torch.Tensor:
        return self._routing.sum_of_tokens(self._rows)


class ChunkedGemmCombine:
    """A grouped GEMM for each destination, pushed as it ends."""

    def __init__(
        self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, routing: Routing, a: torch.Tensor,
        product: GroupedProduct | BlockProduct, numbers: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._routing, self.numbers = routing, numbers
        received, sent, y_like = routing.received, routing.sent, a.new_empty(0, dtype=product.dtype)
        self._messages = messages = Messages(domain, tag, received, sent, y_like, product.features, numbers is not None)
        for peer in (*messages.call.peers, domain.rank):
            rows, of_rows = messages.leaving(peer)
            product.out_of(a, routing.places[peer], rows)
            if numbers is not None:
                of_rows.copy_(numbers.index_select(0, routing.places[peer].index))
            messages.send(peer)

    def finish(self) -> torch.Tensor:
        messages = self._messages
        messages.call.wait_for_all()
        if self.numbers is not None:
            self.numbers = torch.cat([messages.arriving(source)[1] for source in range(self._routing.world_size)])
        return self._routing.sum_of_tokens(messages.call.gathered, messages.capacity)


class FusedGemmCombine:
    """One kernel multiplies, and stores finished rows at their places in the slots of their tokens' ranks."""

    def __init__(
        self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, routing: Routing, a: torch.Tensor,
        product: GroupedProduct | BlockProduct, numbers: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._routing, self.numbers = routing, numbers
        self._call = open_rows(domain, tag, product.dtype, product.features)
        multiply_and_combine(domain, self._call, plan, routing, a, numbers, product)

    def finish(self) -> torch.Tensor:
        self._call.wait_for_all()
        rows, numbers = placed_rows(self._call, self._routing.rows_sent)
        self.numbers = None if self.numbers is None else numbers.clone()
        return self._routing.sum_of_tokens(rows)


METHODS: dict[str, Callable[..., Any]] = {
    "collective": CollectiveGemmCombine,
    "chunked": ChunkedGemmCombine,
    "fused": FusedGemmCombine,
}
