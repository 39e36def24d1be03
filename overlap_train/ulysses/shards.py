"""Which rows of a sequence each rank of one call has, and how shards of different lengths become the equal blocks of an exchange.

Every shard is padded with zeros to the longest one. So slots, parts, methods and plans are those of equal shards, and padding
costs what rows cost: W x longest instead of s. The caller sees none of it:

    x_shard_m [length, b, K]    padded on its way in, unless it is the longest; autograd cuts its gradient
    y_shard_m [longest, b, N]   cut on its way out; autograd pads its gradient with zeros, so padding adds nothing to dw
    q, k, v                     their rows are -1 in `rows_of_ranks`, and nothing is written for them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from ..planning.sequence import SequenceLayout
from .calls import like
from .exchange import Linear
from .linears import rank_rows
from .rows import Rows, SequenceRows, UnequalRows
from .tensor_parallel import ShardedLinear


@dataclass(frozen=True)
class Shards:
    """The shards of a sequence in one call: how `layout` divides it over `ranks` ranks, of which `rank` is this one.

    tensor: how many tensor-parallel ranks have equal parts of a rank's rows.
    """

    layout: SequenceLayout
    ranks: int
    rank: int
    tensor: int = 1

    def padded(self, x_shard_m: torch.Tensor) -> torch.Tensor:
        """x_shard_m [length, b, K], padded with zeros to [longest, b, K]."""
        missing = self._longest - len(x_shard_m)
        return F.pad(x_shard_m, (0, 0, 0, 0, 0, missing)) if missing > 0 else x_shard_m

    def cut(self, y_shard_m: torch.Tensor) -> torch.Tensor:
        """y_shard_m [longest, b, N], cut to this rank's rows [length, b, N]."""
        length = self.layout.lengths[self.rank] // self.tensor if self.layout.lengths else len(y_shard_m)
        return y_shard_m if length == len(y_shard_m) else y_shard_m[:length]

    def as_sent(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor to plan with: x [s, b, C] itself, or with lengths one like it that has as many rows as are exchanged."""
        sent = self.ranks * self.tensor * self._longest
        return like(x, sent, x.shape[-1]) if self.layout.lengths else x

    def rows(self, s: int, device: torch.device) -> torch.Tensor:
        """int64 [W, positions], which row of the sequence each row of each rank is; [W, T, positions] with tensor parallelism."""
        if self.layout.lengths:
            every = self.layout.divided(self.tensor).rows_of_ranks(s, self.ranks * self.tensor, device)
            return every if self.tensor == 1 else every.unflatten(0, (self.ranks, self.tensor))
        rows = self.layout.rows_of_ranks(s, self.ranks, device)
        return rows if self.tensor == 1 else rows.unflatten(1, (self.tensor, -1))

    def finder(self, linear: Linear | ShardedLinear, s: int, device: torch.device) -> Callable[[torch.Tensor], Rows]:
        """A function that says of a tensor [s, b, C] where the exchanged rows lie in it."""
        if isinstance(linear, Linear) and self.layout.is_in_turn:  # nothing is to be copied
            return lambda x: rank_rows(linear, x.flatten(0, 1))
        if self.layout.lengths:
            return partial(UnequalRows, lengths=self.layout.divided(self.tensor).lengths, world_size=self.ranks)
        return partial(SequenceRows, rows=self.rows(s, device))

    @property
    def _longest(self) -> int:
        """Rows of the longest shard of a call with lengths; 0 without."""
        return max(self.layout.lengths, default=0) // self.tensor
