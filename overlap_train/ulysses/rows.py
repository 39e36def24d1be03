"""Where exchanged rows lie in the caller's tensors: rank after rank, in the sequence's order, or as heads of an attention.

The backward of to_rows under tensor parallelism, turn by turn (two_groups.py).

Turn i has one all-to-all. It carries dx of part i - 1, and x of part i if x is sent again. Meanwhile the product for dx of part i
runs. The product for dw reads x when it has come. With an all-to-all of its own, x would have to come before the product: until
then a rank does not know that the third slot is free (group/workspace.py).

    turn    0              1              2              3 (of three parts)
            [x 0 ]         [dx 0, x 1]    [dx 1, x 2]    [dx 2]
            [product 0  ]  [product 1  ]  [product 2  ]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Generic, Protocol, TypeVar

import torch

from ..ops.a2a_gemm import AllToAllGemm
from .attention_layout import HeadNorm, Heads, Rotary, pack, unpack
from .parts import Part, run_steps


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


P = TypeVar("P", bound=Part)


class RowsBackward(Generic[P]):
    """The backward of one call of to_rows under tensor parallelism. x, dx: as for ShardedLinear.rows_backward.

    product: multiplies for a part, and returns its dx as it is sent, or None. It gets the part, and a function that returns the
    part's x, which it may call when dx is under way.
    """

    def __init__(
        self, x: Rows | list[torch.Tensor] | None, dx: Rows | None,
        product: Callable[[P, Callable[[], torch.Tensor]], torch.Tensor | None],
    ) -> None:  # fmt: skip
        self._dx, self._product = dx, product
        self._again = None if isinstance(x, list) else x
        self._kept = iter(x) if isinstance(x, list) else iter(())
        self._made: torch.Tensor | None = None  # dx of the last product, as it is sent

    def run(self, before: P | None, part: P | None) -> None:
        """Run one turn: send dx of `before` and x of `part` in one all-to-all, and multiply for `part` under it. before: None in
        the first turn; part: None in the last."""
        again = None if self._again is None or part is None else self._again.give(part)
        sent = [blocks for blocks in (self._made, again) if blocks is not None]
        back = 0 if self._made is None else self._made.shape[1]
        if not sent:
            self._multiply(part, self._next_kept)
            return

        def read(receiver: AllToAllGemm) -> None:
            received = cache(receiver.received_view)
            self._multiply(part, self._next_kept if again is None else lambda: received()[:, back:])
            if back and self._dx is not None and before is not None:
                self._dx.take(before, received()[:, :back])
            received()  # whatever is frozen here

        whole = sent[0] if len(sent) == 1 else torch.cat(sent, dim=1)
        step = before.backward if before is not None else part.again  # type: ignore[union-attr]
        run_steps([step(lambda: whole, read)])

    def _next_kept(self) -> torch.Tensor:
        return next(self._kept)

    def _multiply(self, part: P | None, x: Callable[[], torch.Tensor]) -> None:
        self._made = None if part is None else self._product(part, x)
