"""Which rows go to which experts in one call, and where they lie at the sender, in a message and at the receiver.

W ranks; E experts, rank r has those from r E/W on; T tokens of this rank. Of one call:

    sent order     this rank's N rows, by expert, then token: what goes to one rank lies together, and what comes back, too
    message        the rows for one rank, in sent order (messages.py)
    placed order   the R rows of all ranks for this rank's experts, by expert, then source rank, then token

The matrix of counts, which every rank has, says all of it but which tokens these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..group.domain import OverlapDomain


@dataclass(frozen=True)
class Places:
    """Rows of one rank, or of all, in placed order: starts and counts by expert of this rank. index: the place of each row in the
    order of its message, int64; None: they are all rows. ends: where the rows of each expert end there, int32 [E/W]."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    index: torch.Tensor | None
    ends: torch.Tensor

    @cached_property
    def in_message(self) -> tuple[int, ...]:
        """Where the rows of each expert start, in the order of the message."""
        return tuple(accumulate(self.counts[:-1], initial=0))


class Routing:
    """The routing of one call, of all ranks; made by `overlap_train.expert_routing`, and given to both operators.

    chosen: bool [T, E], the experts of each of this rank's tokens. counts: rows by rank, then expert. domain: of the group; None in
    simulations.
    """

    domain: OverlapDomain

    def __init__(
        self, chosen: torch.Tensor, counts: Sequence[Sequence[int]], rank: int, domain: OverlapDomain | None = None
    ) -> None:
        self._chosen, self.rank, self.world_size = chosen, rank, len(counts)
        self.tokens_here, self.experts = chosen.shape
        self.device = chosen.device
        if domain is not None:
            self.domain = domain
        per_rank = self.experts // self.world_size
        by_rank = [[row[first : first + per_rank] for first in range(0, self.experts, per_rank)] for row in counts]
        self._to_own = [row[rank] for row in by_rank]  # [W][E/W]
        self.sent = tuple(sum(part) for part in by_rank[rank])  # rows to each rank
        self.received = tuple(map(sum, self._to_own))  # rows from each rank
        self.rows_sent, self.rows_received = sum(self.sent), sum(self.received)
        self.largest = max(sum(part) for row in by_rank for part in row)  # rows of any message between two ranks
        self.total = sum(map(sum, counts))
        self._slot_rows: dict[int, torch.Tensor] = {}
        # Now, and not within an operator, where the host must not wait for what it copies to a device.
        self.places  # noqa: B018

    @cached_property
    def _pairs(self) -> torch.Tensor:
        """(expert, token) of each row in sent order: int64 [N, 2]."""
        return torch.nonzero_static(self._chosen.t().contiguous(), size=self.rows_sent)

    @cached_property
    def tokens(self) -> torch.Tensor:
        """The token of each row in sent order: int64 [N]."""
        return self._pairs[:, 1].contiguous()

    @cached_property
    def pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(token, expert) of each row in sent order, as an index of [T, E]."""
        return self.tokens, self._pairs[:, 0]

    @cached_property
    def _by_token(self) -> torch.Tensor:
        """Rows in sent order, by token, then expert: int64 [N]."""
        return torch.argsort(self.tokens, stable=True)

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
        index = self._by_token if capacity is None else self.in_slot(capacity)
        # One kernel on GPUs, which sums in fp32; of what has 16 bits CPUs might not.
        bags = rows if rows.is_cuda else rows.float()
        bag = torch.nn.functional.embedding_bag
        return bag(index, bags, self._ends_of_tokens, mode="sum", include_last_offset=True).to(rows.dtype)

    def in_slot(self, capacity: int) -> torch.Tensor:
        """As _by_token, of rows in W blocks of `capacity` rows."""
        if capacity not in self._slot_rows:
            firsts = accumulate(self.sent[:-1], initial=0)
            shifts = [peer * capacity - first for peer, first in enumerate(firsts)]
            place = _shifted(shifts, self.sent, self.device)
            self._slot_rows[capacity] = place[self._by_token]
        return self._slot_rows[capacity]

    @cached_property
    def all_places(self) -> Places:
        """Of all rows that this rank's experts get."""
        counts = tuple(map(sum, zip(*self._to_own, strict=True)))
        return Places(tuple(accumulate(counts[:-1], initial=0)), counts, None, self._ends[-1])

    @cached_property
    def _ends(self) -> torch.Tensor:
        """Where the rows of each expert end, in messages from each rank and of all: int32 [W + 1, E/W]."""
        totals = [sum(counts) for counts in zip(*self._to_own, strict=True)]
        ends = [[*accumulate(counts)] for counts in (*self._to_own, totals)]
        return torch.tensor(ends, dtype=torch.int32, device="cpu").to(self.device, non_blocking=True)

    @cached_property
    def place_of_received(self) -> torch.Tensor:
        """The place of each received row, rank after rank, each in the order of its message: int64 [R]."""
        starts = [start for places in self._starts for start in places]
        counts = [count for row in self._to_own for count in row]
        firsts = accumulate(counts[:-1], initial=0)
        shifts = [start - first for start, first in zip(starts, firsts, strict=True)]
        return _shifted(shifts, counts, self.device)

    @cached_property
    def places(self) -> tuple[Places, ...]:
        """Of the rows from each rank."""
        indices = self.place_of_received.split(self.received)
        return tuple(
            Places(starts, tuple(counts), index, ends)
            for starts, counts, index, ends in zip(self._starts, self._to_own, indices, self._ends[:-1], strict=True)
        )

    @cached_property
    def _starts(self) -> tuple[tuple[int, ...], ...]:
        """Where the rows of each expert from each rank start, in placed order: [W][E/W]."""
        by_expert = zip(self.all_places.starts, zip(*self._to_own, strict=True), strict=True)
        return tuple(zip(*(accumulate(counts[:-1], initial=start) for start, counts in by_expert), strict=True))


def _shifted(shifts: Sequence[int], counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """0, 1, 2, ... in runs of `counts`, each run shifted by its number: int64."""
    total = sum(counts)
    both = torch.tensor([[*shifts], [*counts]], dtype=torch.int64, device="cpu").to(device, non_blocking=True)
    return torch.arange(total, device=device) + torch.repeat_interleave(both[0], both[1], output_size=total)
