"""Where exchanged rows lie in the caller's tensors: rank after rank, in the sequence's order, or as heads of an attention."""

from __future__ import annotations

from typing import Protocol

import torch

from .attention_layout import HeadNorm, Heads, Rotary, pack, unpack
from .parts import Part


class Rows(Protocol):
    """The rows of all ranks in a tensor of the caller, with this rank's part of the features."""

    def place(self, part: Part) -> torch.Tensor | None:
        """The memory for the blocks [W, rows, C] of a part if they stay as they arrive; None: `take` makes something else of
        them."""
        ...

    def take(self, part: Part, received: torch.Tensor) -> None:
        """Write the blocks [W, rows, C] that have arrived for a part to where they belong, if `place` has not put them there."""
        ...

    def give(self, part: Part) -> torch.Tensor:
        """The blocks [W, rows, C] of a part that are sent, each contiguous."""
        ...


class RankRows:
    """x [M, C], rank after rank: block r are the positions of rank r, `batch` rows each."""

    def __init__(self, x: torch.Tensor, world_size: int, batch: int) -> None:
        self.x, self._world, self._batch = x, world_size, batch

    def place(self, part: Part) -> torch.Tensor:
        return self.give(part)

    def take(self, part: Part, received: torch.Tensor) -> None:
        pass  # it is in its place

    def give(self, part: Part) -> torch.Tensor:
        blocks = self.x.view(self._world, -1, self.x.shape[-1])
        first, last = part.first * self._batch, part.last * self._batch
        return blocks if last - first == blocks.shape[1] else blocks[:, first:last]


class SequenceRows:
    """x [s, b, C] in the order of the sequence. rows: int64 [W, s/W], which of them each rank has."""

    def __init__(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        self.x, self._rows = x, rows

    def place(self, part: Part) -> None:
        return None

    def take(self, part: Part, received: torch.Tensor) -> None:
        rows = rows_of(self._rows, part)
        self.x[rows] = received.reshape(len(rows), *self.x.shape[1:])

    def give(self, part: Part) -> torch.Tensor:
        return self.x.index_select(0, rows_of(self._rows, part)).view(len(self._rows), -1, self.x.shape[-1])


class UnequalRows:
    """x [s, b, C] in the order of the sequence, of which shard i has lengths[i] rows. Each travels as so many rows as the longest
    has. `world_size` blocks have a shard each, or those of several tensor-parallel ranks.

    A copy for each shard of a part: of 8 ranks 8 small launches, but padding is neither read nor written where it arrives.
    """

    def __init__(self, x: torch.Tensor, lengths: tuple[int, ...], world_size: int) -> None:
        self.x, self._shards, self._world = x, x.split(lengths), world_size

    def place(self, part: Part) -> None:
        return None

    def take(self, part: Part, received: torch.Tensor) -> None:
        blocks = received.reshape(len(self._shards), part.last - part.first, *self.x.shape[1:])
        for shard, block in zip(self._shards, blocks, strict=True):
            rows = shard[part.first : part.last]
            rows.copy_(block[: len(rows)])

    def give(self, part: Part) -> torch.Tensor:
        sent = self.x.new_empty(len(self._shards), part.last - part.first, *self.x.shape[1:])
        for shard, block in zip(self._shards, sent, strict=True):
            rows = shard[part.first : part.last]
            block[: len(rows)] = rows
            block[len(rows) :] = 0
        return sent.view(self._world, -1, self.x.shape[-1])


class HeadRows:
    """q [s, b, query, dim], k and v [s, b, kv, dim], or their gradients.

    rows: int64 [W, positions], which row of the sequence each row of each rank is; -1: padding. bias: added to what is taken.
    """

    def __init__(
        self,
        heads: Heads,
        rows: torch.Tensor,
        rotary: Rotary | None,
        bias: torch.Tensor | None,
        norm: HeadNorm | None,
    ) -> None:
        self._heads, self._rows, self._rotary, self._bias, self._norm = heads, rows, rotary, bias, norm
        self.bias_gradient: torch.Tensor | None = None  # fp32, the sum of what `give` has returned; None: not asked for

    def place(self, part: Part) -> None:
        return None

    def take(self, part: Part, received: torch.Tensor) -> None:
        rows = rows_of(self._rows, part)
        packed = received.reshape(len(rows), self._heads[0].shape[1], -1)
        unpack(packed, self._bias, rows, self._heads, self._rotary, self._norm)

    def give(self, part: Part) -> torch.Tensor:
        packed = pack(self._heads, rows_of(self._rows, part), self._rotary, self._norm).flatten(0, 1)
        if self.bias_gradient is not None:
            self.bias_gradient += packed.sum(0, dtype=torch.float32)
        return packed.view(len(self._rows), -1, packed.shape[-1])


def rows_of(rows: torch.Tensor, part: Part) -> torch.Tensor:
    """The rows of the sequence that a part has, rank after rank. rows: [W, positions], or [W, TP ranks, positions]."""
    return rows[..., part.first : part.last].flatten()
