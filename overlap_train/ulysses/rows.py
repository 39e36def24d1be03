"""Where exchanged rows lie in the caller's tensors: rank after rank, in the sequence's order, or as heads of an attention."""

from __future__ import annotations

import torch

from ..operators.attention_layout import Heads, Rotary, pack, unpack
from ..operators.gemm_all_to_all import Exchange
from .parts import Part


class RankRows:
    """x [M, C], rank after rank: block r are the positions of rank r, `batch` rows each."""

    def __init__(self, x: torch.Tensor | None, world_size: int, positions: int, batch: int) -> None:
        """x: None if it is taken, and not there before."""
        self._x, self._world, self._positions, self._batch = x, world_size, positions, batch

    @property
    def x(self) -> torch.Tensor:
        assert self._x is not None
        return self._x

    def take(self, part: Part, exchange: Exchange) -> None:
        if part.last - part.first == self._positions:
            self._x = exchange.received_copy()
            return
        received = exchange.received_view()
        if self._x is None:
            self._x = received.new_empty(self._world * self._positions * self._batch, received.shape[-1])
        self._of(part).copy_(received)

    def give(self, part: Part) -> torch.Tensor:
        return self._of(part).flatten(0, 1)

    def _of(self, part: Part) -> torch.Tensor:
        """[W, rows of the part, C]"""
        return self.x.view(self._world, -1, self.x.shape[-1])[:, part.first * self._batch : part.last * self._batch]


class SequenceRows:
    """x [s, b, C] in the order of the sequence. rows: int64 [W, s/W], which of them each rank has."""

    def __init__(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        self.x, self._rows = x, rows

    def take(self, part: Part, exchange: Exchange) -> None:
        rows = rows_of(self._rows, part)
        self.x[rows] = exchange.received_view().reshape(len(rows), *self.x.shape[1:])

    def give(self, part: Part) -> torch.Tensor:
        return self.x.index_select(0, rows_of(self._rows, part)).flatten(0, 1)


class HeadRows:
    """q [s, b, query, dim], k and v [s, b, kv, dim], or their gradients; rows: as SequenceRows; bias: of what is taken."""

    def __init__(self, heads: Heads, rows: torch.Tensor, rotary: Rotary | None, bias: torch.Tensor | None) -> None:
        self._heads, self._rows, self._rotary, self._bias = heads, rows, rotary, bias
        self.bias_gradient: torch.Tensor | None = None  # fp32, of what was given; None: not asked for

    def take(self, part: Part, exchange: Exchange) -> None:
        rows = rows_of(self._rows, part)
        packed = exchange.received_view().reshape(len(rows), self._heads[0].shape[1], -1)
        unpack(packed, self._bias, rows, self._heads, self._rotary)

    def give(self, part: Part) -> torch.Tensor:
        packed = pack(self._heads, rows_of(self._rows, part), self._rotary).flatten(0, 1)
        if self.bias_gradient is not None:
            self.bias_gradient += packed.sum(0, dtype=torch.float32)
        return packed


def rows_of(rows: torch.Tensor, part: Part) -> torch.Tensor:
    """Which rows of the sequence a part has, rank after rank."""
    return rows[:, part.first : part.last].flatten()
