"""The attentions of a built model: which are Ulysses', why others are not, and how one becomes Ulysses' in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.attention import Attention

from overlap_train.integrations.megatron.attention.conditions import why_not_turned
from overlap_train.integrations.megatron.attention.core import core_of_rank
from overlap_train.integrations.megatron.attention.self_attention import UlyssesSelfAttention
from overlap_train.integrations.megatron.attention.whole import WholeSequence
from overlap_train.integrations.megatron.linears.context_parallel import ULYSSES, comm_type
from overlap_train.integrations.megatron.linears.in_model import Model, chunks_of

SLOTS = ("qkv", "proj")  # of an attention's linears


def sharing_attentions(model: Model) -> Iterator[Any]:
    """All attentions of a model under context parallelism, Ulysses' and others."""
    for chunk in chunks_of(model):
        for module in chunk.modules():
            if isinstance(module, Attention) and module.config.context_parallel_size > 1:
                yield module


def is_ulysses(attention: Any) -> bool:
    return isinstance(attention, UlyssesSelfAttention)


def is_asked_for(attention: Any) -> bool:
    return comm_type(attention.config, attention.layer_number) == ULYSSES


def why_not_ulysses(attention: Any) -> str | None:
    """Why an attention under context parallelism is not Ulysses' and cannot become so; None: it is, or can."""
    if is_ulysses(attention):
        return None
    if not is_asked_for(attention):
        return f"cp_comm_type={comm_type(attention.config, attention.layer_number)!r} is left to the core attention"
    return why_not_turned(attention)


def turn(attention: Any, whole: WholeSequence) -> None:
    """Turn an attention into a UlyssesSelfAttention, and build its core attention anew for the heads of one rank.

    attention: one of which `why_not_ulysses` is None.
    """
    if is_ulysses(attention):
        return
    core = attention.core_attention
    attention.core_attention = core_of_rank(
        type(core), attention.pg_collection.cp.size(), config=attention.config, layer_number=attention.layer_number,
        attn_mask_type=attention.attn_mask_type, attention_type=attention.attention_type,
        softmax_scale=getattr(attention.config, "softmax_scale", None), pg_collection=attention.pg_collection,
    ).train(core.training)  # fmt: skip
    attention.__class__, attention.whole = UlyssesSelfAttention, whole
