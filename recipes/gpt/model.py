"""The model: Megatron's GPTModel with RMSNorm, SwiGLU, RoPE, GQA and sequence parallelism, with overlapped linears or without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from gpt.lora import add_adapters
from gpt.program import refused_by_rule
from gpt.settings import SHAPE, SMALL, Settings
from overlap_train import OverlapConfig
from overlap_train.integrations.megatron import enable, gpt_block_spec

AS_NAMED = (*SHAPE, "layernorm_epsilon", "qk_layernorm", "gradient_accumulation_fusion")


def build_model(
    settings: Settings,
    overlap: OverlapConfig | None,
    device: torch.device,
    block_spec: Callable[[TransformerConfig], Any] = gpt_block_spec,
    others: Mapping[str, Any] | None = None,
) -> GPTModel:
    """Build it on `device`: bf16 on a GPU, fp32 on the CPU, with overlapped linears where `overlap` is given.

    block_spec: whose modules; others: what these need in TransformerConfig. The initial weights depend on `settings.seed`; those
    of the small model are the same for every tp and cp. Raises RecipeError where Megatron-Core or enable() refuses.
    """
    on_gpu, is_full = device.type == "cuda", settings.recompute == "full"
    if settings.cuda_graph:  # lets a capture switch between Megatron's random states, which draw the same numbers
        initialize_rng_tracker(use_cudagraphable_rng=True, force_reset=True)
    tensor_parallel.model_parallel_cuda_manual_seed(settings.seed)
    torch.manual_seed(settings.seed)
    with refused_by_rule():
        config = TransformerConfig(
            **{name: getattr(settings, name) for name in AS_NAMED},
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,  # so that a resumed run needs no random state
            attention_dropout=0.0,
            bf16=on_gpu,
            params_dtype=torch.bfloat16 if on_gpu else torch.float32,
            tensor_model_parallel_size=settings.tp,
            sequence_parallel=settings.sequence_parallel and settings.tp > 1,
            context_parallel_size=settings.cp,
            cp_comm_type="a2a" if settings.cp > 1 else None,
            # Weights of the small model are drawn on the CPU and then cut, so that they are the same for every
            # tensor-parallel size; billions of them would take minutes.
            use_cpu_initialization=settings.model == SMALL,
            deterministic_mode=settings.deterministic > 0,
            recompute_granularity=None if settings.recompute == "none" else settings.recompute,
            recompute_method="uniform" if is_full else None,  # of a whole layer only the input is kept
            recompute_num_layers=1 if is_full else None,
            # Fusions that need Apex, or a compiler on the user's machine, stay off.
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            **others or {},
        )
        model = GPTModel(
            config,
            block_spec(config),
            vocab_size=settings.vocabulary_rows,
            max_sequence_length=settings.seq_length,
            position_embedding_type="rope",
            rotary_base=settings.rotary_base,
            share_embeddings_and_output_weights=False,
        )
        if settings.lora:
            add_adapters(model, settings.lora)
        model.to(device)
        if overlap is not None:
            enable(model, overlap)
    return model
