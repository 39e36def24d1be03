"""Grouped GEMM + AllToAll: y [T, N] = the sum of each token's rows of a [R, K] @ w[their expert].

The rows for one rank after the other are multiplied and sent as they are done, the own ones last. The receiver adds each token's
rows in order of expert, in fp32, whatever came first: the same bits on every run.
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


class GemmCombine:
    """Products on their way. a: [R, K] in placed order. numbers: fp32 [R], one for each row, or None; they go with it.

    `finish` waits for all. numbers: fp32 [N], those that have come back, in sent order; complete after `finish`.
    """

    numbers: torch.Tensor | None = None

    def finish(self) -> torch.Tensor:
        """The sums [T, N]."""
        raise NotImplementedError


class CollectiveGemmCombine(GemmCombine):
    """One grouped GEMM, then NCCL or gloo."""

    def __init__(
        self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, routing: Routing, a: torch.Tensor,
        product: GroupedProduct, numbers: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._routing = routing
        domain.collective_calls.enter(tag)
        y = a.new_empty(len(a), product.features)
        product.into(y, routing.all_places, a)
        self._rows = self._exchanged(y, domain.group)
        self.numbers = None if numbers is None else self._exchanged(numbers, domain.group)

    def _exchanged(self, placed: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        routing = self._routing
        sent = placed.index_select(0, routing.place_of_received)
        received = placed.new_empty(routing.rows_sent, *placed.shape[1:])
        dist.all_to_all_single(received, sent, [*routing.sent], [*routing.received], group=group)
        return received

    def finish(self) -> torch.Tensor:
        return self._routing.sum_of_tokens(self._rows)


class ChunkedGemmCombine(GemmCombine):
    """A grouped GEMM for each destination, pushed as it ends."""

    def __init__(
        self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, routing: Routing, a: torch.Tensor,
        product: GroupedProduct, numbers: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._domain, self._plan, self._routing = domain, plan, routing
        features, rank = product.features, domain.rank
        self._capacity = capacity_of(domain.layout.slot_bytes, domain.world_size, features, a.dtype)
        self._call = call = domain.workspace.open(torch.Size([self._capacity, features]), a.dtype, tag)
        call.next_epoch()
        self._has_numbers = numbers is not None
        leaving = routing.messages(routing.received, features, a.dtype, self._has_numbers)
        staging = a.new_empty(sum(message.elements for message in leaving))
        self._arriving = [routing.messages([count], features, a.dtype, self._has_numbers)[0] for count in routing.sent]
        for peer in (*call.peers, rank):
            # The own ones lie where peers' come to, for one sum of all.
            message = self._arriving[rank] if peer == rank else leaving[peer]
            memory = call.own_block.view(-1) if peer == rank else staging
            places = routing.places[peer]
            product.out_of(a, places, message.rows_in(memory))
            if numbers is not None and message.rows:
                message.numbers_in(memory).copy_(numbers.index_select(0, places.index))
            if peer != rank:
                domain.engine.push(staging, [call.route(peer, message.begin, message.elements)])

    def finish(self) -> torch.Tensor:
        call = self._call
        call.wait_for_all()
        if self._has_numbers:
            parts = [
                message.numbers_in(block.view(-1)) for message, block in zip(self._arriving, call.blocks, strict=True)
            ]
            self.numbers = torch.cat(parts)
        return self._routing.sum_of_tokens(call.gathered, self._capacity)


METHODS: dict[str, Callable[..., GemmCombine]] = {
    "collective": CollectiveGemmCombine,
    "chunked": ChunkedGemmCombine,
}
