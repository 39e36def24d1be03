"""How a Ulysses attention's linears exchange in one call, and what such a linear knows beside its settings."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from overlap_train import AttentionHeads, SequenceLayout, SequenceShards
from overlap_train.integrations.megatron.linears.state import LinearOverlap


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

    def shards(self, tp_group: dist.ProcessGroup | None) -> SequenceShards:
        """Who has which rows, for the operators. tp_group: of the linear that exchanges."""
        assert self.group is not None
        return SequenceShards(self.group, self.layout, tp_group)


@dataclass
class UlyssesOverlap(LinearOverlap):
    """The attribute `overlap` of a linear that exchanges within its product."""

    groups: dict[dist.ProcessGroup, None] = field(default_factory=dict)  # of overlapped calls, the last one's last
    # Under TP, of the last call that could exchange: why its exchange was a collective; or how many parts hid each other's.
    # Before the first such call also why there is none.
    apart: str | None = None
    parts: int | None = None

    @property
    def has_told_nothing(self) -> bool:
        """Whether no call has told the table how this linear exchanges under TP."""
        return self.parts is None and self.apart is None

    def count_exchange(self, reason: str | None, exchange: Exchange) -> None:
        """Count one forward call, as `count`, and note the group over which it exchanged."""
        self.count(reason)
        if reason is None and exchange.group is not None:
            self._note(exchange.group)

    def count_over_tp(self, exchange: Exchange, parts: int) -> None:
        """Count one forward call whose product and exchange hide each other, in parts. The linear that overlaps over TP counts
        all others."""
        assert exchange.group is not None
        self.count(None)
        self.parts = parts
        self._note(exchange.group)

    def _note(self, group: dist.ProcessGroup) -> None:
        self.groups.pop(group, None)
        self.groups[group] = None
