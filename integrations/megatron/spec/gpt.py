"""GPT layer specs for models that are assembled from specs.

They start from Megatron-Core's own local specs and exchange two things: the norms (norm.py) and the core attention
(attention.py). With context parallelism the self-attention is ours, too (attention/self_attention.py). Everything else, linears
and checkpoint keys included, stays Megatron's: `enable()` overlaps the linears of the built model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from overlap_train.integrations.megatron.attention.self_attention import UlyssesSelfAttention
from overlap_train.integrations.megatron.attention.whole import WholeSequence
from overlap_train.integrations.megatron.norm import Norm
from overlap_train.integrations.megatron.spec.attention import SDPACoreAttention

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def gpt_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The specs of all layers that this pipeline stage builds and its final norm; the argument that GPTModel takes.

    `vp_stage` is the virtual pipeline stage, None without one. It also serves as `--spec overlap_train.integrations.megatron.spec
    gpt_block_spec`. Raises ValueError for multi-latent attention.
    """
    config = getattr(config, "transformer", config)  # Megatron 0.19's `--spec` passes its GPTModelConfig
    if config.multi_latent_attention:
        raise ValueError(
            "config.multi_latent_attention=True: these specs build plain and grouped-query attention; take Megatron's "
            "own spec, and slots=('proj', 'fc1', 'fc2', 'output') for enable() (--overlap-train-slots proj,fc1,fc2,output)"
        )
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    whole = WholeSequence() if config.context_parallel_size > 1 else None
    # Layers of one kind share one spec object, as in Megatron; each object is exchanged once.
    exchanged = {id(spec): _exchanged(spec, whole) for spec in block.layer_specs}
    return TransformerBlockSubmodules(layer_specs=[exchanged[id(spec)] for spec in block.layer_specs], layer_norm=Norm)


def _exchanged(layer: ModuleSpec, whole: WholeSequence | None) -> ModuleSpec:
    """A copy of a local layer spec with our norms and attention. whole: of context parallelism."""
    parts = layer.submodules
    parts = replace(
        parts,
        input_layernorm=_norm(parts.input_layernorm),
        self_attention=_attention(parts.self_attention, whole),
        pre_mlp_layernorm=_norm(parts.pre_mlp_layernorm),
    )
    return replace(layer, submodules=parts)


def _attention(attention: ModuleSpec, whole: WholeSequence | None) -> ModuleSpec:
    inner = attention.submodules
    q_norm, k_norm = _norm(inner.q_layernorm), _norm(inner.k_layernorm)
    inner = replace(inner, core_attention=SDPACoreAttention, q_layernorm=q_norm, k_layernorm=k_norm)
    if whole is None:
        return replace(attention, submodules=inner)
    params = {**(attention.params or {}), "whole": whole}
    return replace(attention, module=UlyssesSelfAttention, submodules=inner, params=params)


def _norm(entry: Any) -> Any:
    """No norm stays no norm, and the norm without parameters needs no mark."""
    return entry if entry in (IdentityOp, L2Norm) else Norm
