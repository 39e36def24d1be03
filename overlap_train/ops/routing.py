"""Which rows go to which experts in one call, and where they lie at the sender, in a message and at the receiver.

W ranks; E experts, rank r has those from r E/W on; T tokens of this rank. Of one call:

    sent order     this rank's N rows, by expert, then token: what goes to one rank lies together, and what comes back, too
    message        the rows for one rank, in sent order (messages.py)
    placed order   the R rows of all ranks for this rank's experts, by expert, then as they arrive: own rows, those of rank-1,
                   ...; of each rank by token

The matrix of counts, which every rank has, says all of it but which tokens these are. The host waits for it where it first asks
for a number of rows. By then the GPU has begun to work out what kernels are told (expert_tables.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from ..select.tiles import HOPPER_TILE
from .expert_tables import Tables, expert_tables
from .launch_experts import MOST_RANKS, sum_on_gpu

if TYPE_CHECKING:
    from ..group.domain import OverlapDomain

_ROWS_OF_A_TOKEN = 8  # that there is room for before the host knows how many rows there are: 192 bytes a token
_Counts: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class Places:
    """Rows of one rank, or of all, in placed order: starts and counts by expert of this rank. index: the place of each row in the
    order of its message, int64; None: they are all rows. ends: where the rows of each expert end there, int32 [E/W]."""

    starts: Sequence[int]
    counts: Sequence[int]
    index: torch.Tensor | None
    ends: torch.Tensor

    @cached_property
    def in_message(self) -> list[int]:
        """Where the rows of each expert start, in the order of the message."""
        return [*accumulate(self.counts[:-1], initial=0)]


class Routing:
    """The routing of one call, of all ranks; made by `overlap_train.expert_routing`, and given to both operators.

    chosen: bool [T, E], the experts of each of this rank's tokens. counts: rows by rank and expert, int32 [W, E]. domain: of the
    group.

    sent, received: rows to, and from, each rank. largest: of any message between two ranks. total: of all ranks. all_places: of
    all rows for this rank's experts. The first of these that is read waits for the counts, and raises OverlapTimeoutError or
    OverlapMismatchError where they have not come.
    """

    def __init__(self, chosen: torch.Tensor, counts: torch.Tensor, domain: OverlapDomain) -> None:
        self._chosen, self._counts_here, self.domain = chosen, counts, domain
        self.world_size, (self.tokens_here, self.experts), self.device = len(counts), chosen.shape, chosen.device
        self._room = min(_ROWS_OF_A_TOKEN, self.experts) * self.tokens_here
        self._counts_there, self._arrival = _on_its_way(counts)
        self._rows_begun = _rows_of(chosen, self._room)
        self._tables_begun: Tables | None = None
        if domain.on_gpu and self.world_size <= MOST_RANKS:  # else nobody asks for them
            most_pairs = self._room * self.world_size // HOPPER_TILE.block_m + self.experts // self.world_size
            self._tables_begun = expert_tables(domain.launches, counts, domain.rank, self._room, most_pairs)

    @cached_property
    def _counts(self) -> _Counts:
        """Rows from each rank to each one's experts, on the host: [W, W, E/W]. It waits for them."""
        if self._arrival is not None:
            self._arrival.synchronize()
            self.domain.fault.check()  # else they are not those of all ranks
        return self._counts_there.numpy().reshape(self.world_size, self.world_size, -1)

    @cached_property
    def _here(self) -> _Counts:
        return self._counts[:, self.domain.rank]

    @cached_property
    def _between_ranks(self) -> _Counts:
        return self._counts.sum(2)

    @cached_property
    def sent(self) -> list[int]:
        return self._between_ranks[self.domain.rank].tolist()

    @cached_property
    def received(self) -> list[int]:
        return self._between_ranks[:, self.domain.rank].tolist()

    @cached_property
    def rows_sent(self) -> int:
        return sum(self.sent)

    @cached_property
    def rows_received(self) -> int:
        return sum(self.received)

    @cached_property
    def largest(self) -> int:
        return int(self._between_ranks.max())

    @cached_property
    def total(self) -> int:
        return int(self._between_ranks.sum())

    @cached_property
    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, places = self._rows_begun if self.rows_sent <= self._room else _rows_of(self._chosen, self.rows_sent)
        return tokens[: self.rows_sent], places[: self.rows_sent]

    @property
    def tokens(self) -> torch.Tensor:
        """The token of each row in sent order: int64 [N]."""
        return self._rows[0]

    @property
    def places_of_tokens(self) -> torch.Tensor:
        """Its place in [T, E], of which expert and token are: int64 [N]."""
        return self._rows[1]

    @cached_property
    def tables(self) -> Tables:
        """What kernels of experts are told."""
        pairs = int((-(-self._here.sum(0) // HOPPER_TILE.block_m)).sum())
        begun = self._tables_begun
        if begun is not None and self.rows_sent <= self._room and pairs <= begun.most_pairs:
            return begun
        return expert_tables(self.domain.launches, self._counts_here, self.domain.rank, self.rows_sent, pairs)

    @cached_property
    def _starts(self) -> _Counts:
        """Where the rows from each rank for each expert begin in placed order."""
        turns = (
            self.domain.rank - np.arange(self.world_size)
        ) % self.world_size  # of ranks; also the rank of each turn
        return _before_each(self._here[turns].T[None])[0].T[turns]

    @cached_property
    def _ends(self) -> torch.Tensor:
        """Where they end for each expert, of the rows of each rank, and of all: int32 [W + 1, E/W]."""
        return _on_device(np.vstack((self._here, self._here.sum(0))).cumsum(1, dtype=np.int32), self.device)

    @cached_property
    def all_places(self) -> Places:
        ends = self._ends[-1] if self._tables_begun is None else self.tables.ends
        return Places(self._starts[self.domain.rank].tolist(), self._here.sum(0).tolist(), None, ends)

    @cached_property
    def place_of_received(self) -> torch.Tensor:
        """The place in placed order of each row of the messages from all ranks, one behind the other: int64 [R]."""
        return _shifted(self._starts - _before_each(self._here[None])[0], self._here, self.rows_received, self.device)

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
        _ = self.places, self._in_message

    @cached_property
    def _by_token(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows in sent order, by token, then expert: int64 [N]; where each token's begin there, and the last one's end: int64
        [T + 1])."""
        places, rows = self.places_of_tokens.sort()
        firsts = torch.arange(0, self.tokens_here * self.experts + 1, self.experts, device=self.device)
        return rows, torch.searchsorted(places, firsts)

    @cached_property
    def _in_message(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(place in its message, rank that it goes to) of each row by token: int64 [N]."""
        rank, (by_token, _) = self.places_of_tokens % self.experts // (self.experts // self.world_size), self._by_token
        return self._place_in_message[by_token], rank[by_token]

    def sum_of_tokens(self, rows: torch.Tensor, capacity: int | None = None) -> torch.Tensor:
        """The sum of each token's rows [N, H], in sent order -> [T, H]: in order of expert, in fp32, rounded once. capacity: the
        rows lie as W blocks of so many, block d from rank d, one below the other."""
        if not self.rows_sent:
            return rows.new_zeros(self.tokens_here, rows.shape[1])
        index, ends = self._by_token
        if capacity is not None:
            place, rank = self._in_message
            index = place + rank * capacity
        if rows.is_cuda:
            return sum_on_gpu(self.domain, rows, index, ends)
        bag = torch.nn.functional.embedding_bag
        return bag(index, rows.float(), ends, mode="sum", include_last_offset=True).to(rows.dtype)


def _on_its_way(counts: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """(where counts will be on the host, what they are waited for by)."""
    if not counts.is_cuda:
        return counts, None
    there, arrival = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True), torch.cuda.Event()
    there.copy_(counts, non_blocking=True)
    arrival.record()
    return there, arrival


def _rows_of(chosen: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(token, place in chosen) of each row in sent order, int64 [most]: the host does not wait for how many there are."""
    expert, token = torch.nonzero_static(chosen.t(), size=most).unbind(1)
    return token.contiguous(), torch.add(expert, token, alpha=chosen.shape[1])


def _before_each(counts: _Counts) -> _Counts:
    """How much comes before each, in each of the matrices."""
    flat = counts.reshape(len(counts), -1)
    return (flat.cumsum(1, dtype=np.int32) - flat).reshape(counts.shape)


def _shifted(shifts: _Counts, counts: _Counts, total: int, device: torch.device) -> torch.Tensor:
    """0, 1, 2, ... in runs of `counts`, `total` of them together, each run shifted by its number: int64 [total]."""
    both = _on_device(np.stack((shifts.ravel(), counts.ravel())), device)
    return torch.arange(total, device=device) + torch.repeat_interleave(both[0], both[1], output_size=total)


def _on_device(numbers: _Counts, device: torch.device) -> torch.Tensor:
    """Numbers of the host, by a copy for which it does not wait: within an operator it must not."""
    tensor = torch.from_numpy(numbers)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
