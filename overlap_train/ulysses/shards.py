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
from functools import cached_property, partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .calls import like
from .exchange import Linear
from .layout import SequenceLayout
from .linears import rank_rows
from .rows import Rows, SequenceRows, UnequalRows
from .two_groups import Groups, ShardedLinear

CONTIGUOUS = SequenceLayout()


@dataclass(frozen=True)
class SequenceShards:
    """Who has which rows of a sequence: of both projections of an attention, and mostly of all layers of a model.

    group: the W ranks that exchange, each with a shard of the rows. layout: which rows these are. tp_group: T tensor-parallel
    ranks that divide the weights, and have T equal parts of this rank's shard; None: weights are whole.

    Raises:
        ValueError: tp_group is group.
    """

    group: dist.ProcessGroup
    layout: SequenceLayout = CONTIGUOUS
    tp_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.tp_group is self.group and self.group is not None:
            raise ValueError(
                "SequenceShards: tp_group is group; they must be two groups: group exchanges, tp_group divides the weights. "
                "Leave tp_group out where each rank of group has whole weights"
            )

    @cached_property
    def ranks(self) -> int:
        """W."""
        return dist.get_world_size(self.group)

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @cached_property
    def tensor(self) -> int:
        """T."""
        return 1 if self.tp_group is None else dist.get_world_size(self.tp_group)

    @cached_property
    def both(self) -> Groups | None:
        """Both groups; None if weights are whole, because tp_group is None or has one rank."""
        return None if self.tp_group is None or self.tensor == 1 else Groups(self.group, self.tp_group)

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


def shards_error(shards: SequenceShards, name: str) -> str | None:
    """Why `shards`, of whatever type, are no SequenceShards, or None."""
    if isinstance(shards, SequenceShards):
        return None
    return f"{name}: shards={shards!r} must be SequenceShards(group, layout, tp_group)"
