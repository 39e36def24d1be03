"""Settings of a Megatron-Core model under which no linear could overlap, each with its way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

WAY_TO_FALL_BACK = (
    "or run Megatron's own linears with on_unsupported='fallback' (--overlap-train-on-unsupported fallback)"
)


def bad_combination(config: TransformerConfig) -> str | None:
    """What in `config` rules out overlap everywhere, as one sentence naming field, value, rule and way out; or None."""
    tensor_parallel = config.tensor_model_parallel_size
    if tensor_parallel == 1:
        return _sentence(config, "tensor_model_parallel_size", "with one rank there is nothing to overlap", "2 or more")
    if not config.sequence_parallel:
        rule = "what is overlapped are all-gather and reduce-scatter, which Megatron uses under sequence parallelism"
        return _sentence(config, "sequence_parallel", rule, "True (--sequence-parallel)")
    if config.tp_comm_overlap:
        rule = "TransformerEngine's overlap and this one exclude each other"
        return _sentence(config, "tp_comm_overlap", rule, "False (leave out --tp-comm-overlap)")
    if getattr(config, "transformer_impl", None) == "inference_optimized":
        return _sentence(config, "transformer_impl", "overlap is for training", "'local'")
    if getattr(config, "use_transformer_engine_op_fuser", False):
        rule = "with it TransformerEngine computes an MLP without calling its linears"
        return _sentence(config, "use_transformer_engine_op_fuser", rule, "False")
    for field in ("fp8", "fp4"):
        if getattr(config, field, None):
            return _sentence(config, field, "only TransformerEngine's linears compute in it", "None")
    for field in ("cpu_offloading", "fine_grained_activation_offloading"):
        if getattr(config, field, False):
            return _sentence(config, field, "what an overlapped linear saves for backward stays on the GPU", "False")
    return None


def _sentence(config: TransformerConfig, field: str, rule: str, wanted: str) -> str:
    return f"{field}={getattr(config, field)!r} in the model's config: {rule}; set it to {wanted}, {WAY_TO_FALL_BACK}"
