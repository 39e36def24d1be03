"""Which rows of an attention's QKV weight each rank of a Ulysses group needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from .indices import kept


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of an attention, whose QKV weight has Megatron's order: for each KV head its query heads, then k, then v.

    query, kv: numbers of heads (kv: Megatron's num_query_groups). dim: features of a head.
    """

    query: int
    kv: int
    dim: int

    @property
    def features(self) -> int:
        """N of the QKV weight [N, K]."""
        return (self.query + 2 * self.kv) * self.dim

    @cached_property
    def meaning(self) -> str:
        """The heads in words, as ranks compare them."""
        return str(self)

    @property
    def per_group(self) -> int:
        """Query heads that share a KV head."""
        return self.query // self.kv

    def of_rank(self, world_size: int) -> AttentionHeads:
        """What each of `world_size` ranks has after the exchange: at least one KV head."""
        return AttentionHeads(self.query // world_size, max(1, self.kv // world_size), self.dim)

    def error(self, world_size: int, name: str) -> str | None:
        """Why the heads cannot be divided among so many ranks, or None."""
        if self.query < 1 or self.kv < 1 or self.dim < 1 or self.query % self.kv:
            return f"{name}: heads={self}: all must be at least 1, and query a multiple of kv"
        if self.query % world_size:
            return (
                f"{name}: heads.query={self.query} query heads cannot be divided among the {world_size} ranks of the "
                f"group; use a group whose size divides {self.query}"
            )
        if self.kv % world_size and world_size % self.kv:
            return (
                f"{name}: heads.kv={self.kv} KV heads and a group of {world_size} ranks: one number must divide the other; use "
                f"another group size"
            )
        return None

    def sent_rows(self, world_size: int, device: torch.device) -> torch.Tensor | None:
        """Rows of the weight [N, K] in the order in which their products are sent, rank after rank; None: as they lie.

        Where there are fewer KV heads than ranks, k and v of one head go to several ranks.
        """
        return None if self.kv % world_size == 0 else _sent_rows(device, self, world_size)


@kept
def _sent_rows(device: torch.device, heads: AttentionHeads, world_size: int) -> torch.Tensor:
    groups = torch.arange(heads.features, device=device).view(heads.kv, heads.per_group + 2, heads.dim)
    ranks_of_group = world_size // heads.kv
    queries = groups[:, :-2].reshape(world_size, -1)
    shared = groups[:, -2:].flatten(1).repeat_interleave(ranks_of_group, dim=0)
    return torch.cat((queries, shared), dim=1).flatten()
