"""GPT layer specs for models that are assembled from specs.

They start from Megatron-Core's own local specs and exchange three things: the norms (norm.py), the core attention (attention.py)
and, where an `OverlapConfig` is given, the linears of dense layers. With context parallelism the self-attention is ours, too
(attention/self_attention.py). Everything else, checkpoint keys included, stays Megatron's.
No spec reaches the output layer, which GPTModel builds itself: call `enable()` on the built model for that one. It leaves linears
that already overlap as they are.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from ..attention.in_model import SLOTS as EXCHANGING_SLOTS
from ..attention.self_attention import UlyssesSelfAttention
from ..attention.whole import WholeSequence
from ..linears.column_row import overlapped_class
from ..linears.conditions import bad_combination
from ..linears.ulysses import exchanging_class
from ..norm import Norm
from .attention import SDPACoreAttention

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from overlap_train import OverlapConfig


def gpt_layer_spec(config: TransformerConfig, overlap: OverlapConfig | None = None) -> ModuleSpec:
    """The spec of one layer of `config`: dense, or with experts where `config.num_moe_experts` is set.

    With `overlap` the linears that its `slots` names (qkv, proj, fc1, fc2) are built as overlapped ones; experts are left alone.
    A GPTModel with a single layer spec picks its final norm itself, and that norm refuses sequence parallelism: give GPTModel
    `gpt_block_spec` instead.

    Raises:
        ValueError: multi-latent attention, or settings of `config` that rule out the overlap asked for (with
            overlap.on_unsupported="fallback" the linears are Megatron's then).
    """
    config, overlap = _checked(config, overlap)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
    return _Parts(config, overlap, WholeSequence()).exchange(spec)


def gpt_block_spec(
    config: TransformerConfig, overlap: OverlapConfig | None = None, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The specs of all layers that this pipeline stage builds and its final norm; the argument that GPTModel takes.

    `overlap` and errors as in gpt_layer_spec; `vp_stage` is the virtual pipeline stage, None without one. It also serves as
    `--spec overlap_train.integrations.megatron.spec gpt_block_spec`; enable() then overlaps what it builds.
    """
    config, overlap = _checked(config, overlap)
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    # Layers of one kind share one spec object, as in Megatron; each object is exchanged once.
    parts = _Parts(config, overlap, WholeSequence())
    exchanged = {id(spec): parts.exchange(spec) for spec in block.layer_specs}
    return TransformerBlockSubmodules(layer_specs=[exchanged[id(spec)] for spec in block.layer_specs], layer_norm=Norm)


@dataclass(frozen=True)
class _Parts:
    """What is put into the layer specs of one model."""

    config: TransformerConfig
    overlap: OverlapConfig | None
    whole: WholeSequence

    def exchange(self, layer: ModuleSpec) -> ModuleSpec:
        """A copy of a local layer spec with our norms, attention and (given `overlap`) linears."""
        parts = layer.submodules
        parts = replace(
            parts,
            input_layernorm=_norm(parts.input_layernorm),
            self_attention=self._attention(parts.self_attention),
            pre_mlp_layernorm=_norm(parts.pre_mlp_layernorm),
            mlp=self._dense_mlp(parts.mlp),
        )
        return replace(layer, submodules=parts)

    def _attention(self, attention: ModuleSpec) -> ModuleSpec:
        inner = attention.submodules
        inner = replace(
            inner,
            linear_qkv=self._linear(inner.linear_qkv, "qkv"),
            core_attention=SDPACoreAttention,
            linear_proj=self._linear(inner.linear_proj, "proj"),
            q_layernorm=_norm(inner.q_layernorm),
            k_layernorm=_norm(inner.k_layernorm),
        )
        if self.config.context_parallel_size == 1:
            return replace(attention, submodules=inner)
        params = {**(attention.params or {}), "whole": self.whole}
        return replace(attention, module=UlyssesSelfAttention, submodules=inner, params=params)

    def _dense_mlp(self, entry: Any) -> Any:
        """Exchange the linears of a dense MLP; Megatron 0.16 describes it by a ModuleSpec, 0.19 by a functools.partial."""
        is_partial = isinstance(entry, functools.partial)
        parts = entry.keywords["submodules"] if is_partial else entry.submodules
        if not isinstance(parts, MLPSubmodules):
            return entry
        parts = replace(
            parts, linear_fc1=self._linear(parts.linear_fc1, "fc1"), linear_fc2=self._linear(parts.linear_fc2, "fc2")
        )
        if is_partial:
            return functools.partial(entry.func, *entry.args, **{**entry.keywords, "submodules": parts})
        return replace(entry, submodules=parts)

    def _linear(self, entry: type, slot: str) -> Any:
        """A ModuleSpec is the one way to hand an argument to a linear that both Megatron versions accept in every place."""
        if self.overlap is None or slot not in self.overlap.slots:
            return entry
        over_tp = self.config.tensor_model_parallel_size > 1
        if self.config.context_parallel_size > 1 and slot in EXCHANGING_SLOTS:
            return ModuleSpec(module=exchanging_class(entry, over_tp), params={"overlap": self.overlap})
        return ModuleSpec(module=overlapped_class(entry), params={"overlap": self.overlap}) if over_tp else entry


def _norm(entry: Any) -> Any:
    """No norm stays no norm, and the norm without parameters needs no mark."""
    return entry if entry in (IdentityOp, L2Norm) else Norm


def _checked(config: Any, overlap: OverlapConfig | None) -> tuple[TransformerConfig, OverlapConfig | None]:
    """The TransformerConfig, and `overlap` (None where it cannot act and may fall back). ValueError for what cannot be built."""
    config = getattr(config, "transformer", config)  # Megatron 0.19's `--spec` passes its GPTModelConfig
    if config.multi_latent_attention:
        raise ValueError(
            "config.multi_latent_attention=True: these specs build plain and grouped-query attention; take Megatron's "
            "own spec, and slots=('proj', 'fc1', 'fc2', 'output') for enable() (--overlap-train-slots proj,fc1,fc2,output)"
        )
    problem = None if overlap is None else bad_combination(config)
    if problem is not None and overlap.on_unsupported == "error":  # type: ignore[union-attr]
        raise ValueError(problem)
    return config, overlap if problem is None else None
