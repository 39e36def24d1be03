"""The core attention between the exchanges: context parallelism 1, all rows, and the heads of one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.extensions import transformer_engine as megatron_te

from overlap_train import AttentionHeads

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig


def heads_of(config: TransformerConfig) -> AttentionHeads:
    """Heads of one tensor-parallel rank, before the exchange."""
    tp = config.tensor_model_parallel_size
    return AttentionHeads(config.num_attention_heads // tp, max(1, config.num_query_groups // tp), config.kv_channels)


def core_of_rank(
    build: Callable[..., Any],
    ranks: int,
    *,
    config: TransformerConfig,
    cp_comm_type: str | None = None,
    **arguments: Any,
) -> Any:
    """What `build`, a core attention's class with Megatron's arguments, makes of one rank's heads."""
    return build(config=config_of_rank(config, ranks), cp_comm_type=None, **arguments)


def config_of_rank(config: TransformerConfig, ranks: int) -> TransformerConfig:
    """A copy with context parallelism 1 and the heads that one of `ranks` has after the exchange."""
    own, heads, tp = copy.copy(config), heads_of(config).of_rank(ranks), config.tensor_model_parallel_size
    own.context_parallel_size, own.cp_comm_type = 1, None
    own.num_attention_heads, own.num_query_groups = heads.query * tp, heads.kv * tp
    return own


def is_transformer_engines(core: Any) -> bool:
    return megatron_te.HAVE_TE and isinstance(core, megatron_te.TEDotProductAttention)


def without_group(packed: PackedSeqParams | None) -> PackedSeqParams | None:
    """The PackedSeqParams for the core attention: a copy without context-parallel group and size, or `packed` itself where it has
    none. The core attention has all rows; with a group, TransformerEngine's would turn its own context parallelism on."""
    if packed is None or (getattr(packed, "cp_group", None) is None and getattr(packed, "local_cp_size", None) is None):
        return packed
    own = copy.copy(packed)
    own.cp_group = own.local_cp_size = None
    return own


def without_rows(x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """x [t, ...] with zeros where `padding` [t] is true, and zeros in the gradients of these rows, whatever comes: also NaN."""
    return x if padding is None else x.masked_fill(padding.view(-1, *[1] * (x.dim() - 1)), 0)
