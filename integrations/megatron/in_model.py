"""The parallel linears and attentions of a model: which there are, and which of them `enable` overlaps in place, and how."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import Attention

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron.attention import (
    UlyssesSelfAttention,
    core_of_rank,
    is_asked_for,
    no_exchange,
    why_not_ulysses,
)
from overlap_train.integrations.megatron.conditions import Problem, divides_weights
from overlap_train.integrations.megatron.linears import (
    LinearOverlap,
    OverlappedColumnParallelLinear,
    OverlappedRowParallelLinear,
    overlapped_forms,
    turn_linear,
    why_not,
)
from overlap_train.integrations.megatron.ulysses_linears import exchanging_forms
from overlap_train.integrations.megatron.whole_sequence import WholeSequence

Model = torch.nn.Module | Sequence[torch.nn.Module]

# How Megatron-Core names the linears in its modules -> our name of the linear slot.
SLOT_OF_ATTRIBUTE = {
    "linear_qkv": "qkv",
    "linear_proj": "proj",
    "linear_fc1": "fc1",
    "linear_fc2": "fc2",
    "output_layer": "output",
}
ATTENTION_SLOTS = {"qkv", "proj"}
_OWN = (ColumnParallelLinear, RowParallelLinear, OverlappedColumnParallelLinear, OverlappedRowParallelLinear)


def chunks_of(model: Model) -> list[torch.nn.Module]:
    """A model, or the chunks of a virtual pipeline, as a list."""
    return [model] if isinstance(model, torch.nn.Module) else list(model)


def named_linears(model: Model) -> Iterator[tuple[str, Any]]:
    """(name, module) of the modules in one of our linear slots and of all other parallel linears of Megatron's own classes.

    Names are those of the bare model, without the wrappers' leading "module."; of several chunks with "chunk0." before them.
    """
    chunks = chunks_of(model)
    for index, chunk in enumerate(chunks):
        prefix = f"chunk{index}." if len(chunks) > 1 else ""
        for name, module in chunk.named_modules():
            if (slot_of(name) is not None and hasattr(module, "weight")) or type(module) in _OWN:
                yield prefix + re.sub(r"^(module\.)+", "", name), module


def overlapped_linears(model: Model) -> list[Any]:
    return [linear for _, linear in named_linears(model) if is_overlapped(linear)]


def slot_of(name: str) -> str | None:
    """ "decoder.layers.0.mlp.linear_fc1" -> "fc1"; None for a name that is no linear slot."""
    return SLOT_OF_ATTRIBUTE.get(name.rpartition(".")[2])


def is_overlapped(linear: Any) -> bool:
    return isinstance(getattr(linear, "overlap", None), LinearOverlap)


def is_row(linear: Any) -> bool:
    """Whether it is a row linear, Megatron's or an overlapped one of TransformerEngine."""
    return hasattr(linear, "input_is_parallel")


def is_candidate(linear: Any) -> bool:
    """Whether a linear overlaps, or is of a class that has an overlapped form and is no expert."""
    is_expert = getattr(linear, "is_expert", False) or getattr(linear, "parallel_mode", "column") is None
    return is_overlapped(linear) or (type(linear) in overlapped_forms() and not is_expert)


def sharing_attentions(model: Model) -> Iterator[Any]:
    """All attentions of a model under context parallelism, Ulysses' and others."""
    for chunk in chunks_of(model):
        for module in chunk.modules():
            if isinstance(module, Attention) and module.config.context_parallel_size > 1:
                yield module


@dataclass(frozen=True)
class Attentions:
    """The attentions whose linears config.slots names. ours: those that are Ulysses', or can be. problem: why another one cannot
    be; None: all can, or config.slots names no linear of an attention."""

    ours: tuple[Any, ...]
    problem: Problem | None

    def exchanges(self, linear: Any) -> bool:
        """Whether a linear is to exchange: linear_qkv or linear_proj of one of ours. One that cannot overlaps over TP alone."""
        for attention in self.ours:
            if linear is attention.linear_qkv or linear is attention.linear_proj:
                return attention.pg_collection.tp.size() == 1 or why_not(linear, exchanges=True) is None
        return False

    def why_not(self, linear: Any) -> str | None:
        """Why no call of a linear can overlap, within its attention's exchange or over tensor parallelism; None: some can."""
        return why_not(linear, self.exchanges(linear))

    def overlap(self, linear: Any, config: OverlapConfig, slot: str, name: str) -> None:
        """Overlap a linear in place, of which `why_not` is None."""
        forms = exchanging_forms(divides_weights(linear)) if self.exchanges(linear) else overlapped_forms()
        turn_linear(linear, forms[type(linear)], config, slot, name)

    def turn(self, timeout_s: float) -> None:
        """Make them Ulysses', with core attentions that are built anew for the heads of one rank. timeout_s: how long their ranks
        wait for each other's rotary frequencies and masks."""
        whole = WholeSequence()
        for attention in self.ours:
            if not isinstance(attention, UlyssesSelfAttention):
                core = attention.core_attention
                attention.core_attention = core_of_rank(
                    type(core), attention.pg_collection.cp.size(), config=attention.config,
                    layer_number=attention.layer_number, attn_mask_type=attention.attn_mask_type,
                    attention_type=attention.attention_type, pg_collection=attention.pg_collection,
                    softmax_scale=getattr(attention.config, "softmax_scale", None),
                ).train(core.training)  # fmt: skip
                attention.__class__, attention.whole = UlyssesSelfAttention, whole
            attention.whole.timeout_s = timeout_s


def find_attentions(chunks: Sequence[torch.nn.Module], config: OverlapConfig) -> Attentions:
    """Find the attentions whose linears are asked for, and why one of them cannot be Ulysses'. Changes nothing."""
    if not ATTENTION_SLOTS & set(config.slots):
        return Attentions((), None)
    asked = [attention for attention in sharing_attentions(chunks) if is_asked_for(attention)]
    reasons = [why_not_ulysses(attention) for attention in asked]
    ours = tuple(attention for attention, reason in zip(asked, reasons, strict=True) if reason is None)
    return Attentions(ours, no_exchange(next(filter(None, reasons), None)))
