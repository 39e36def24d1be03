"""UlyssesSelfAttention: Megatron-Core's SelfAttention under context parallelism with cp_comm_type "a2a".

    x [s/W, b, h] -> QKV projection and exchange -> q, k, v of all s rows and heads / W, in the order of the sequence
      -> norms of q and k -> rotary positions -> core attention -> exchange and output projection -> [s/W, b, h]

The exchange's own pass takes rotary positions where no norm comes before them. The core attention has context parallelism 1, all
rows, and the heads of one rank. W: context-parallel ranks; with tensor parallelism x is [s / (W tp), b, h] and heads are those of
one tensor-parallel rank. Parameters, their names and the checkpoint are SelfAttention's.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.transformer.attention import Attention, CrossAttention, SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

from overlap_train import AttentionHeads, Rotary, SequenceLayout
from overlap_train.integrations.megatron.conditions import ULYSSES, Problem, broken_rule, comm_type
from overlap_train.integrations.megatron.linears import Model, chunks_of
from overlap_train.integrations.megatron.packed import ZIGZAG, ZIGZAG_OF_PACK, Documents, cut_of, documents_of
from overlap_train.integrations.megatron.ulysses_linears import Exchange, exchanges_call
from overlap_train.integrations.megatron.whole_sequence import (
    Heads,
    WholeSequence,
    collective_to_heads,
    collective_to_rows,
)

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig


def heads_of(config: TransformerConfig) -> AttentionHeads:
    """Heads of one tensor-parallel rank, before the exchange."""
    tp = config.tensor_model_parallel_size
    return AttentionHeads(config.num_attention_heads // tp, max(1, config.num_query_groups // tp), config.kv_channels)


def core_of_rank(build: Callable[..., Any], ranks: int, *, config: TransformerConfig, **arguments: Any) -> Any:
    """What `build`, a core attention's class with Megatron's arguments, makes with context parallelism 1 and the heads that one
    of `ranks` has after the exchange."""
    own, heads, tp = copy.copy(config), heads_of(config).of_rank(ranks), config.tensor_model_parallel_size
    own.context_parallel_size, own.cp_comm_type = 1, None
    own.num_attention_heads, own.num_query_groups = heads.query * tp, heads.kv * tp
    return build(config=own, **{**arguments, "cp_comm_type": None})


def is_transformer_engines(core: Any) -> bool:
    return megatron_te.HAVE_TE and isinstance(core, megatron_te.TEDotProductAttention)


def without_group(packed: PackedSeqParams | None) -> PackedSeqParams | None:
    """The PackedSeqParams for the core attention, which has all rows: without context-parallel group and size, with which
    TransformerEngine's would turn its own context parallelism on."""
    if packed is None or (getattr(packed, "cp_group", None) is None and getattr(packed, "local_cp_size", None) is None):
        return packed
    own = copy.copy(packed)
    own.cp_group = own.local_cp_size = None
    return own


def without_rows(x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """x [t, ...] with zeros where `padding` [t] is true, and zeros in the gradients of these rows, whatever comes: also NaN."""
    return x if padding is None else x.masked_fill(padding.view(-1, *[1] * (x.dim() - 1)), 0)


_RULES = (
    ("multi_latent_attention", False, "its keys and values are compressed, and there is no QKV projection to exchange"),
    ("attention_output_gate", False, "the gate is computed with q and would have to be exchanged with it"),
    ("softmax_type", "vanilla", "softmax offsets belong to heads, and each rank would need those of its own"),
    ("qk_clip", False, "it takes the largest logits of this rank's own heads"),
    ("log_max_attention_logit", False, "it takes the largest logits of this rank's own heads"),
)


def bad_setting(config: TransformerConfig, ranks: int) -> str | None:
    """Why a model's settings keep an attention from exchanging over `ranks` ranks, or None."""
    return broken_rule(config, _RULES) or heads_of(config).error(ranks, "heads per TP rank")


def no_exchange(why: str | None) -> Problem | None:
    """why: what the table of linears says of an attention that cannot exchange."""
    if why is None:
        return None
    instead = "take TransformerEngine's own context parallelism with cp_comm_type 'p2p' or 'all_gather'"
    return Problem(f"cp_comm_type='a2a' in the model's config, but {why}", instead)


def why_not_ulysses(attention: Any) -> str | None:
    """Why a built attention under context parallelism is not Ulysses' and cannot become so; None: it is, or can."""
    config, kind = attention.config, type(attention)
    if isinstance(attention, UlyssesSelfAttention):
        return None
    if not is_asked_for(attention):
        return f"cp_comm_type={comm_type(config, attention.layer_number)!r} is left to the core attention"
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


def sharing_attentions(model: Model) -> list[Any]:
    """All attentions of a model under context parallelism, Ulysses' and others."""
    attentions = [x for chunk in chunks_of(model) for x in chunk.modules() if isinstance(x, Attention)]
    return [attention for attention in attentions if attention.config.context_parallel_size > 1]


def is_asked_for(attention: Any) -> bool:
    return comm_type(attention.config, attention.layer_number) == ULYSSES


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


class UlyssesSelfAttention(SelfAttention):
    """Takes the arguments of SelfAttention and `whole`, which the layers of a model share."""

    whole: WholeSequence

    def __init__(
        self, config: Any, submodules: Any, *args: Any, cp_comm_type: str | None = None, pg_collection: Any = None,
        whole: WholeSequence | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Raises ValueError for settings of `config` with which there is no Ulysses attention, and another cp_comm_type."""
        ranks = config.context_parallel_size
        problem = no_exchange(bad_setting(config, ranks))
        if cp_comm_type != ULYSSES:
            rule = "without TransformerEngine's core attention context parallelism is Ulysses' only"
            wanted = "set it to 'a2a' for every layer (--cp-comm-type a2a), or build the model from TransformerEngine's"
            problem = Problem(f"cp_comm_type={cp_comm_type!r}: {rule}", f"{wanted} layer spec", can_fall_back=False)
        if problem is not None:
            raise problem.error
        inner = replace(submodules, core_attention=functools.partial(core_of_rank, submodules.core_attention, ranks))
        super().__init__(config, inner, *args, cp_comm_type=cp_comm_type, pg_collection=pg_collection, **kwargs)
        self.whole = whole or WholeSequence()

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None, inference_context: Any = None, rotary_pos_emb: Any = None,
        rotary_pos_cos: Any = None, rotary_pos_sin: Any = None, rotary_pos_cos_sin: Any = None,
        attention_bias: torch.Tensor | None = None, packed_seq_params: Any = None, sequence_len_offset: Any = None,
        *, inference_params: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """(output [s/W, b, h], bias or None). attention_mask: [b, 1, s/W, s], this rank's rows, or of all rows. Raises ValueError
        for a call that is not of self-attention in training or evaluation, or whose rows cannot be cut as Megatron cuts them."""
        group, others = self._group(packed_seq_params), dict(
            key_value_states=key_value_states, inference_context=inference_context, inference_params=inference_params,
            rotary_pos_cos=rotary_pos_cos, rotary_pos_sin=rotary_pos_sin, rotary_pos_cos_sin=rotary_pos_cos_sin,
            attention_bias=attention_bias,
        )  # fmt: skip
        ranks = 1 if group is None else group.size()
        refuse_call(self.core_attention, ranks, self.pg_collection.cp.size(), others)
        documents = None if packed_seq_params is None else documents_of(packed_seq_params)
        # x: the rows of one context-parallel rank, or under sequence parallelism this tensor-parallel rank's part of them.
        rows = len(hidden_states) * ranks * (self.pg_collection.tp.size() if self.config.sequence_parallel else 1)
        exchange = self._exchange(group, rows, cut_of(packed_seq_params, self.config), documents, hidden_states.device)
        freqs = self._frequencies(rotary_pos_emb, exchange, documents)
        q, k, v = self._heads(hidden_states, exchange, freqs)
        context = self._attended(q, k, v, self._mask(attention_mask, exchange), packed_seq_params)
        return self._projected(context, exchange)

    def _group(self, packed: Any) -> dist.ProcessGroup | None:
        """The context-parallel group of this call. Megatron may choose another for each micro-batch (cp_group of `packed`), or
        none (local_cp_size without cp_group)."""
        if getattr(packed, "cp_group", None) is not None:
            return packed.cp_group
        return None if getattr(packed, "local_cp_size", None) is not None else self.pg_collection.cp

    def _exchange(
        self, group: dist.ProcessGroup | None, rows: int, cut: str, documents: Documents | None, device: torch.device
    ) -> Exchange:
        """cut: contiguous, zigzag (within each document), or zigzag_pack."""
        heads, ranks = heads_of(self.config), 1 if group is None else group.size()
        starts = documents.with_rest(rows) if documents is not None and cut == ZIGZAG else ()
        layout = SequenceLayout(ZIGZAG if cut == ZIGZAG_OF_PACK else cut, starts)
        how = "cut as one sequence" if cut == ZIGZAG_OF_PACK else f"with cp_partition_mode={cut!r}"
        name = f"{'packed_seq_params' if documents else 'sequence'} {how}"
        problem = layout.error(rows, ranks, name) or heads.error(ranks, "cp_group")
        if problem is not None and ranks > 1:
            raise ValueError(f"{problem} (Ulysses, context parallelism {ranks})")
        return Exchange(group, heads, layout, rows, device)

    def _frequencies(
        self, rotary_pos_emb: Any, exchange: Exchange, documents: Documents | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The rotary frequencies of q and of k for all rows; None where this layer does not rotate."""
        skips = self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1]
        if rotary_pos_emb is None or skips:
            return None, None
        both = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
        whole_pack = not self.config.apply_rope_fusion  # TransformerEngine's kernel begins anew with each document
        return tuple(
            None if freqs is None else self.whole.frequencies(freqs, exchange, documents, whole_pack) for freqs in both
        )  # type: ignore[return-value]

    def _heads(
        self, x: torch.Tensor, exchange: Exchange, freqs: tuple[torch.Tensor | None, torch.Tensor | None]
    ) -> Heads:
        """q, k and v of all rows, normalised and rotated."""
        linear = self.linear_qkv
        if exchanges_call(linear, x, exchange):
            norms = (self.q_layernorm, self.k_layernorm)
            are_normalised = any(norm is not None and not isinstance(norm, IdentityOp) for norm in norms)
            rotary = None if are_normalised else self._rotary_within(freqs)
            q, k, v = linear.to_heads(x, exchange, rotary)
            if rotary is not None:
                return q, k, v
            q, k = (x if norm is None else norm(x) for norm, x in zip(norms, (q, k), strict=True))
        else:
            q, k, v = self.get_query_key_value_tensors(x)
            q, k, v = collective_to_heads(q, k, v, exchange)
        return self._rotated(q, freqs[0]), self._rotated(k, freqs[1]), v

    def _rotary_within(self, freqs: tuple[torch.Tensor | None, torch.Tensor | None]) -> Rotary | None:
        """What the exchange's own pass can do: one angle for each row, of q and k alike."""
        are_alike, angles = freqs[0] is freqs[1], freqs[0]
        if angles is None or not are_alike or angles.shape[1:-1].numel() > 1:
            return None
        return self.whole.rotary(angles, self._mscale, self.config.rotary_interleaved)

    @property
    def _mscale(self) -> float:
        return _yarn_get_concentration_factor_from_config(self.config)

    def _rotated(self, x: torch.Tensor, freqs: torch.Tensor | None) -> torch.Tensor:
        """x rotated by Megatron's own function, if there are freqs: one for each row."""
        if freqs is None:
            return x
        return apply_rotary_pos_emb(x, freqs, config=self.config, mscale=self._mscale, cp_group=self.pg_collection.cp)

    def _mask(self, mask: torch.Tensor | None, exchange: Exchange) -> torch.Tensor | None:
        """The attention mask of all rows. TransformerEngine ignores one beside a causal mask type; none is made for it."""
        ignored = self.attn_mask_type == AttnMaskType.causal and is_transformer_engines(self.core_attention)
        return None if mask is None or ignored else self.whole.mask(mask, exchange, self.layer_number)

    def _attended(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, packed: Any
    ) -> torch.Tensor:
        """[s, b, heads / W * dim]."""
        is_thd, padding = packed is not None and packed.qkv_format == "thd", None
        if is_thd:
            if is_transformer_engines(self.core_attention):  # which leaves rows between documents as they are
                padding = documents_of(packed).padding(len(q), q.device)
            q, k, v = (without_rows(x.squeeze(1), padding) for x in (q, k, v))
        recomputed = self.checkpoint_core_attention and self.training
        attend = self._checkpointed_attention_forward if recomputed else self.core_attention
        own = without_group(packed)
        context = attend(q, k, v, mask, attn_mask_type=self.attn_mask_type, attention_bias=None, packed_seq_params=own)
        return without_rows(context, padding).reshape(len(context), 1, -1) if is_thd else context

    def _projected(self, context: torch.Tensor, exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor | None]:
        linear = self.linear_proj
        if exchanges_call(linear, context, exchange):
            return linear.to_rows(context, exchange)
        return linear(collective_to_rows(context, exchange))
