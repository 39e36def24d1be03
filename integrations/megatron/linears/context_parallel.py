"""What a model's settings say about context parallelism: which layers are Ulysses' (cp_comm_type "a2a")."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

ULYSSES = "a2a"
MEGATRONS_DEFAULT = "p2p"  # TransformerEngine's, where cp_comm_type is None


def comm_type(config: TransformerConfig, layer_number: int) -> str:
    """cp_comm_type of a layer, counted from 1."""
    types = config.cp_comm_type
    if isinstance(types, list):
        return types[min(layer_number, len(types)) - 1]
    return types or MEGATRONS_DEFAULT


def has_ulysses(config: TransformerConfig) -> bool:
    """Whether any layer is Ulysses'. A linear on its own may have a ModelParallelConfig, which knows no layers."""
    types = getattr(config, "cp_comm_type", None)
    return getattr(config, "context_parallel_size", 1) > 1 and ULYSSES in (
        types if isinstance(types, list) else [types]
    )
