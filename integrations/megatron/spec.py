"""GPT layer specs for sequence parallelism without TransformerEngine, and the core attention in them.

They start from Megatron-Core's own local specs and exchange the norms (norm.py) and the core attention; with context parallelism
the self-attention, too (attention.py). Everything else, linears and checkpoint keys included, stays Megatron's: `enable()`
overlaps the linears of the built model. `--spec overlap_train.integrations.megatron.spec gpt_block_spec` names this module.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from overlap_train.integrations.megatron.attention import UlyssesSelfAttention
from overlap_train.integrations.megatron.conditions import broken_rule
from overlap_train.integrations.megatron.norm import Norm
from overlap_train.integrations.megatron.packed import Softmax, documents_of, packed_attention
from overlap_train.integrations.megatron.whole_sequence import WholeSequence

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig


class SDPACoreAttention(MegatronModule):
    """softmax(scale · q kᵀ + mask) v per head by torch's scaled_dot_product_attention; the constructor is DotProductAttention's.

    The scores [b, n, s, s] are never stored. Under context parallelism a UlyssesSelfAttention builds this for the heads of its
    rank, with context parallelism 1. `scale` is `softmax_scale`, or 1 / sqrt(kv_channels). The scores never leave fp32, so
    `config.apply_query_key_layer_scaling` changes nothing.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType, attention_type: str,
        attention_dropout: float | None = None, softmax_scale: float | None = None, cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:  # fmt: skip
        """Raises ValueError for settings of `config` that change the attention in a way not offered here."""
        super().__init__(config=config)
        if problem := broken_rule(config, _RULES):
            raise ValueError(
                f"config.{problem}, or put another core attention than SDPACoreAttention into the layer spec"
            )
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None, attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """query [sq, b, n, d], key and value [sk, b, g, d] with n a multiple of g -> context [sq, b, n·d].

        `attention_mask` (bool, broadcasts to [b, n, sq, sk], True hides) decides alone where it is given, as in
        DotProductAttention; without one a causal mask type means key j is seen by query i where j <= i.
        Of packed sequences (thd) query is [t, n, d], key and value [t, g, d] -> context [t, n·d], without a mask.
        Raises ValueError for an attention bias, a mask beside packed sequences, or a causal mask with sq != sk.
        """
        _refuse_call(attention_bias, packed_seq_params, attention_mask)
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params)
        mask = None if attention_mask is None else ~attention_mask
        causal = mask is None and self._is_causal(query.size(0), key.size(0))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        with self._random_state():
            context = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0, is_causal=causal,
                scale=self.softmax_scale, enable_gqa=q.size(1) != k.size(1),
            )  # fmt: skip
        return context.permute(2, 0, 1, 3).flatten(2)

    def _packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        is_causal = self.attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        softmax = Softmax(self.softmax_scale, is_causal, self.dropout if self.training else 0.0)
        with self._random_state():
            return packed_attention(query, key, value, documents_of(packed), softmax).flatten(1)

    def _is_causal(self, queries: int, keys: int) -> bool:
        if self.attn_mask_type != AttnMaskType.causal or queries == 1:  # one query over a cache of keys sees them all
            return False
        if queries != keys:
            raise ValueError(
                f"query and key: {queries} queries and {keys} keys with a causal mask, but the causal mask is for "
                "self-attention, where they are as many; pass attention_mask"
            )
        return True

    def _random_state(self):
        """Heads are split over ranks, so dropout must differ between them; under SP the block has forked already."""
        forks = self.training and self.dropout != 0.0 and not self.config.sequence_parallel
        return get_cuda_rng_tracker().fork() if forks else nullcontext()


_RULES = (
    ("context_parallel_size", 1, "one rank must hold the whole sequence outside a UlyssesSelfAttention"),
    ("window_size", None, "sliding windows are not offered"),
    ("softmax_type", "vanilla", "softmax offsets are not offered"),
)


def _refuse_call(
    attention_bias: torch.Tensor | None, packed_seq_params: PackedSeqParams | None, attention_mask: torch.Tensor | None
) -> None:
    if attention_bias is not None:
        raise ValueError(
            f"attention_bias={type(attention_bias).__name__}: SDPACoreAttention takes attention_bias=None only; use "
            "attention_mask, or TransformerEngine's core attention in the layer spec"
        )
    if packed_seq_params is not None and packed_seq_params.qkv_format != "thd":
        what = f"packed_seq_params.qkv_format={packed_seq_params.qkv_format!r}"
        rule = "SDPACoreAttention takes packed sequences as 'thd'"
        raise ValueError(f"{what}: {rule}; set it, or pass packed_seq_params=None")
    if packed_seq_params is not None and attention_mask is not None:
        rule = "documents attend within themselves, without a mask"
        raise ValueError(f"attention_mask beside packed_seq_params: {rule}; pass attention_mask=None")


def gpt_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The specs of all layers that this pipeline stage builds and its final norm; the argument that GPTModel takes.

    `vp_stage` is the virtual pipeline stage. It also serves as `--spec overlap_train.integrations.megatron.spec gpt_block_spec`.
    Raises ValueError for multi-latent attention.
    """
    config = getattr(config, "transformer", config)  # Megatron 0.19's `--spec` passes its GPTModelConfig
    if config.multi_latent_attention:
        raise ValueError(
            "config.multi_latent_attention=True: these specs build plain and grouped-query attention; take Megatron's own spec"
        )
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )  # fmt: skip
    whole = WholeSequence() if config.context_parallel_size > 1 else None
    # Layers of one kind share one spec object, as in Megatron; each object is exchanged once.
    exchanged = {id(spec): _exchanged(spec, whole) for spec in block.layer_specs}
    return TransformerBlockSubmodules(layer_specs=[exchanged[id(spec)] for spec in block.layer_specs], layer_norm=Norm)


def _exchanged(layer: ModuleSpec, whole: WholeSequence | None) -> ModuleSpec:
    """A copy of a local layer spec with our norms and attention. whole: of context parallelism."""
    parts, attention = layer.submodules, layer.submodules.self_attention
    inner = attention.submodules
    q_norm, k_norm = _norm(inner.q_layernorm), _norm(inner.k_layernorm)
    inner = replace(inner, core_attention=SDPACoreAttention, q_layernorm=q_norm, k_layernorm=k_norm)
    attention = replace(attention, submodules=inner)
    if whole is not None:
        params = {**(attention.params or {}), "whole": whole}
        attention = replace(attention, module=UlyssesSelfAttention, params=params)
    before, after = _norm(parts.input_layernorm), _norm(parts.pre_mlp_layernorm)
    parts = replace(parts, input_layernorm=before, self_attention=attention, pre_mlp_layernorm=after)
    return replace(layer, submodules=parts)


def _norm(entry: Any) -> Any:
    """No norm stays no norm, and the norm without parameters needs no mark."""
    return entry if entry in (IdentityOp, L2Norm) else Norm
