"""How a Ulysses attention's linears exchange in one call, and what such a linear knows beside its settings."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from overlap_train import AttentionHeads, SequenceLayout

from .state import LinearOverlap


@dataclass(frozen=True)
class Exchange:
    """One call's exchange between sequence shards and head shards.

    group: the context-parallel ranks; None where the call has none. heads: of all ranks of the group, and of this
    tensor-parallel rank. layout: how the ranks share the sequence. order: which row of the sequence each row of each rank is,
    rank after rank; places: where each row of the sequence is among these. Both on the device of the activations.
    """

    group: dist.ProcessGroup | None
    heads: AttentionHeads
    layout: SequenceLayout
    order: torch.Tensor
    places: torch.Tensor

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()


@dataclass
class UlyssesOverlap(LinearOverlap):
    """The attribute `overlap` of a linear that exchanges within its product."""

    groups: dict[dist.ProcessGroup, None] = field(default_factory=dict)  # of overlapped calls, the last one's last
    # Under TP, of the last call that could exchange: why its exchange was a collective; or how many parts hid each other's, and
    # rows of the first. Before the first such call also why there is none.
    apart: str | None = None
    parts: tuple[int, int] | None = None

    @property
    def has_told_nothing(self) -> bool:
        """Whether no call has told the table how this linear exchanges under TP."""
        return self.parts is None and self.apart is None

    def count_exchange(self, reason: str | None, x: torch.Tensor, weight: torch.Tensor, exchange: Exchange) -> None:
        """Count one forward call, as `count`, and note the group over which it exchanged. Of linear_qkv it keeps the shape of the
        rows that are sent: more than the weight has, where KV heads go to several ranks."""
        self.count(reason, x, weight)
        if reason is not None or exchange.group is None:
            return
        self._note(exchange.group)
        if self.slot == "qkv":
            sent = exchange.heads.of_rank(exchange.ranks).features * exchange.ranks
            self.sizes = x.shape, torch.Size((sent, weight.shape[1])), x.dtype

    def count_over_tp(self, x: torch.Tensor, weight: torch.Tensor, exchange: Exchange, parts: tuple[int, int]) -> None:
        """Count one forward call whose product and exchange hide each other, in parts. The linear that overlaps over TP counts
        all others."""
        assert exchange.group is not None
        self.count(None, x, weight)
        self.parts = parts
        self._note(exchange.group)

    def _note(self, group: dist.ProcessGroup) -> None:
        self.groups.pop(group, None)
        self.groups[group] = None
