"""Which rows go to which experts in one call, and where they lie at the sender, in a message and at the receiver.

W ranks; E experts, rank r has those from r E/W on; T tokens of this rank. Of one call:

    sent order     this rank's N rows, by expert, then token: what goes to one rank lies together, and what comes back, too
    message        the rows for one rank, in sent order (messages.py)
    placed order   the R rows of all ranks for this rank's experts, by expert, then source rank, then token

The matrix of counts, which every rank has, says all of it but which tokens these are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from .expert_tables import Counts, Tables, before_each, expert_tables
from .launch_experts import sum_on_gpu

if TYPE_CHECKING:
    from ..group.domain import OverlapDomain


@dataclass(frozen=True)
class Places:
    """Rows of one rank, or of all, in placed order: starts and counts by expert of this rank. index: the place of each row in the
    order of its message, int64; None: they are all rows. ends: where the rows of each expert end there, int32 [E/W]."""

    starts: list[int]
    counts: list[int]
    index: torch.Tensor | None
    ends: torch.Tensor

    @cached_property
    def in_message(self) -> list[int]:
        """Where the rows of each expert start, in the order of the message."""
        return [*accumulate(self.counts[:-1], initial=0)]


class Routing:
    """The routing of one call, of all ranks; made by `overlap_train.expert_routing`, and given to both operators.

    chosen: bool [T, E], the experts of each of this rank's tokens. counts: rows by rank and expert, integers [W, E] of the host.
    domain: of the group.

    sent, received: rows to, and from, each rank. largest: of any message between two ranks. total: of all ranks. all_places: of
    all rows for this rank's experts.
    """

    def __init__(self, chosen: torch.Tensor, counts: torch.Tensor, domain: OverlapDomain) -> None:
        self._chosen, self.domain, self.world_size = chosen, domain, len(counts)
        self.tokens_here, self.experts = chosen.shape
        self.device, rank = chosen.device, domain.rank
        from_to_expert = (self.world_size, self.world_size, self.experts // self.world_size)
        self._counts: Counts = counts.numpy().astype(np.int32).reshape(from_to_expert)
        self._here, between_ranks = self._counts[:, rank], self._counts.sum(2)
        self.sent: list[int] = between_ranks[rank].tolist()
        self.received: list[int] = between_ranks[:, rank].tolist()
        self.rows_sent, self.rows_received = sum(self.sent), sum(self.received)
        self.largest, self.total = int(between_ranks.max()), int(between_ranks.sum())

    @cached_property
    def _starts(self) -> Counts:
        """Where the rows from each rank for each expert begin in placed order."""
        return before_each(self._here.T[None])[0].T

    @cached_property
    def _ends(self) -> torch.Tensor:
        """Where they end for each expert, of the rows of each rank, and of all: int32 [W + 1, E/W]."""
        return _on_device(np.vstack((self._here, self._here.sum(0))).cumsum(1, dtype=np.int32), self.device)

    @cached_property
    def all_places(self) -> Places:
        return Places(self._starts[0].tolist(), self._here.sum(0).tolist(), None, self._ends[-1])

    @cached_property
    def place_of_received(self) -> torch.Tensor:
        """The place in placed order of each row of the messages from all ranks, one behind the other: int64 [R]."""
        return _shifted(self._starts - before_each(self._here[None])[0], self._here, self.rows_received, self.device)

    @cached_property
    def places(self) -> list[Places]:
        """Those of the rows from each rank."""
        indices = self.place_of_received.split(self.received)
        return [*map(Places, self._starts.tolist(), self._here.tolist(), indices, self._ends)]

    @cached_property
    def _place_in_message(self) -> torch.Tensor:
        """The place in its message of each row in sent order: int64 [N]."""
        sent = np.array(self.sent)
        return _shifted(sent - sent.cumsum(), sent, self.rows_sent, self.device)

    def prepare(self) -> None:
        """Work out what messages want, before an operator, within which the host reads no tensor."""
        _ = self.places, self._place_in_message

    @cached_property
    def tables(self) -> Tables:
        """What kernels of experts are told."""
        return expert_tables(self._counts, self.domain.rank, partial(_on_device, device=self.device))

    @cached_property
    def pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(token, expert) of each row in sent order, as an index of [T, E]: int64 [N] each."""
        pairs = torch.nonzero_static(self._chosen.t().contiguous(), size=self.rows_sent).t().contiguous()
        return pairs[1], pairs[0]

    @property
    def tokens(self) -> torch.Tensor:
        """The token of each row in sent order: int64 [N]."""
        return self.pairs[0]

    @cached_property
    def _by_token(self) -> torch.Tensor:
        """Rows in sent order, by token, then expert: int64 [N]."""
        return torch.argsort(self.tokens, stable=True)

    @cached_property
    def _in_message(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(place in its message, rank that it goes to) of each row in `_by_token`: int64 [N]."""
        rank = self.pairs[1] // (self.experts // self.world_size)
        return self._place_in_message[self._by_token], rank[self._by_token]

    @cached_property
    def _ends_of_tokens(self) -> torch.Tensor:
        """Where the rows of each token begin in `_by_token`, and the last one's end: int64 [T + 1]."""
        ends = self._chosen.sum(1).cumsum(0)
        return torch.cat((ends.new_zeros(1), ends))

    def sum_of_tokens(self, rows: torch.Tensor, capacity: int | None = None) -> torch.Tensor:
        """The sum of each token's rows [N, H], in sent order -> [T, H]: in order of expert, in fp32, rounded once. capacity: the
        rows lie as W blocks of so many, block d from rank d, one below the other."""
        if not self.rows_sent:
            return rows.new_zeros(self.tokens_here, rows.shape[1])
        index = self._by_token
        if capacity is not None:
            place, rank = self._in_message
            index = place + rank * capacity
        if rows.is_cuda:
            return sum_on_gpu(self.domain, rows, index, self._ends_of_tokens)
        bag = torch.nn.functional.embedding_bag
        return bag(index, rows.float(), self._ends_of_tokens, mode="sum", include_last_offset=True).to(rows.dtype)


def _shifted(shifts: Counts, counts: Counts, total: int, device: torch.device) -> torch.Tensor:
    """0, 1, 2, ... in runs of `counts`, `total` of them together, each run shifted by its number: int64 [total]."""
    both = _on_device(np.stack((shifts.ravel(), counts.ravel())), device)
    return torch.arange(total, device=device) + torch.repeat_interleave(both[0], both[1], output_size=total)


def _on_device(numbers: Counts, device: torch.device) -> torch.Tensor:
    """Numbers of the host, by a copy for which it does not wait: within an operator it must not."""
    tensor = torch.from_numpy(numbers)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
