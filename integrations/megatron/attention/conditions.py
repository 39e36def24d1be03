"""What keeps an attention with cp_comm_type "a2a" from our exchanges: settings of the model, its modules, or one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.transformer.attention import CrossAttention, SelfAttention
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

from overlap_train.integrations.megatron.attention.core import heads_of, is_transformer_engines

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

_WITHOUT_US = (
    "To train without our exchange, set cp_comm_type to 'p2p' or 'all_gather' for TransformerEngine's own context parallelism, "
    "or leave 'a2a' to TransformerEngine with on_unsupported='fallback' (--overlap-train-on-unsupported fallback)"
)


def bad_setting(config: TransformerConfig, ranks: int) -> str | None:
    """Why a model's settings keep an attention from exchanging over `ranks` ranks: setting, rule and way out; or None."""
    rules = (
        (
            "multi_latent_attention",
            False,
            "its keys and values are compressed, and there is no QKV projection to exchange",
        ),
        ("attention_output_gate", False, "the gate is computed with q and would have to be exchanged with it"),
        ("softmax_type", "vanilla", "softmax offsets belong to heads, and each rank would need those of its own"),
        ("qk_clip", False, "it takes the largest logits of this rank's own heads"),
        ("log_max_attention_logit", False, "it takes the largest logits of this rank's own heads"),
    )
    for field, wanted, rule in rules:
        value = getattr(config, field, wanted)
        if value != wanted:
            return f"{field}={value!r}: {rule}; set it to {wanted!r}"
    return heads_of(config).error(ranks, "heads per TP rank")


def in_full(why: str | None) -> str | None:
    """The error for an attention that cannot exchange. why: what the table of linears says of it, which has no room for more;
    None: it can."""
    return None if why is None else f"cp_comm_type='a2a' in the model's config, but {why}. {_WITHOUT_US}"


def why_not_turned(attention: Any) -> str | None:
    """Why a built attention with cp_comm_type "a2a" cannot become ours; None: it can, or is."""
    config, kind = attention.config, type(attention)
    if isinstance(attention, MultiLatentAttention):
        return bad_setting(config, 1)
    if issubclass(kind, CrossAttention):
        return f"{kind.__name__}: only self-attention has one sequence to exchange"
    if kind is not SelfAttention:
        return f"{kind.__name__}: only Megatron-Core's SelfAttention has an overlapped form"
    if not is_transformer_engines(attention.core_attention):
        core = type(attention.core_attention).__name__
        return f"core attention {core}: only TransformerEngine's can be rebuilt; build the model from gpt_block_spec"
    return bad_setting(config, attention.pg_collection.cp.size())


def refuse_call(core: Any, ranks: int, ranks_of_model: int, others: dict[str, Any]) -> None:
    """Raise ValueError for a call that Ulysses cannot serve. `others`: arguments of Megatron's forward that must be None."""
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"{name}={type(value).__name__}: a Ulysses attention (cp_comm_type='a2a') takes {name}=None only; it is for "
                "self-attention in training and evaluation, without an attention bias"
            )
    if ranks != ranks_of_model and is_transformer_engines(core):
        raise ValueError(
            f"packed_seq_params: this call's context parallelism has {ranks} ranks, the model's {ranks_of_model}, for whose "
            "heads TransformerEngine's core attention is built; keep the group, or build the model from gpt_block_spec"
        )
