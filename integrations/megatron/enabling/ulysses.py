"""Which attentions enable() turns into Ulysses', and which of their linears then exchange within their product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron.attention.conditions import in_full
from overlap_train.integrations.megatron.attention.in_model import (
    SLOTS,
    is_asked_for,
    sharing_attentions,
    turn,
    why_not_ulysses,
)
from overlap_train.integrations.megatron.attention.whole import WholeSequence
from overlap_train.integrations.megatron.linears.in_model import overlap_linear, why_not
from overlap_train.integrations.megatron.linears.ulysses import exchange_in, why_no_exchange


@dataclass(frozen=True)
class Attentions:
    """The attentions whose linears config.slots names. ours: those that are Ulysses', or can be. problem: why another one cannot
    be; None: all can, or config.slots names no linear of an attention."""

    ours: tuple[Any, ...]
    problem: str | None

    def exchanges(self, linear: Any) -> bool:
        """Whether a linear is to exchange: linear_qkv or linear_proj of one of ours. One that cannot overlaps over TP alone."""
        for attention in self.ours:
            if linear is attention.linear_qkv or linear is attention.linear_proj:
                return attention.pg_collection.tp.size() == 1 or why_no_exchange(linear) is None
        return False

    def why_not(self, linear: Any) -> str | None:
        """Why no call of a linear can overlap, within its attention's exchange or over tensor parallelism; None: some can."""
        return why_no_exchange(linear) if self.exchanges(linear) else why_not(linear)

    def overlap(self, linear: Any, config: OverlapConfig, slot: str, name: str) -> None:
        """Overlap a linear in place, of which `why_not` is None."""
        (exchange_in if self.exchanges(linear) else overlap_linear)(linear, config, slot, name)

    def turn(self, timeout_s: float) -> None:
        """Make them Ulysses'. timeout_s: how long their ranks wait for each other's rotary frequencies and masks."""
        whole = WholeSequence()
        for attention in self.ours:
            turn(attention, whole)
            attention.whole.timeout_s = timeout_s


def find_attentions(chunks: Sequence[torch.nn.Module], config: OverlapConfig) -> Attentions:
    """Find the attentions whose linears are asked for, and why one of them cannot be Ulysses'. Changes nothing."""
    if not set(SLOTS) & set(config.slots):
        return Attentions((), None)
    asked = [attention for attention in sharing_attentions(chunks) if is_asked_for(attention)]
    reasons = [why_not_ulysses(attention) for attention in asked]
    ours = tuple(attention for attention, reason in zip(asked, reasons, strict=True) if reason is None)
    return Attentions(ours, in_full(next(filter(None, reasons), None)))
