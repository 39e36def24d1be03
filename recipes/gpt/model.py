"""The model: Megatron's GPTModel with RMSNorm, SwiGLU, RoPE, GQA and sequence parallelism, wrapped for training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from gpt.architectures import SMALL, Architecture
from gpt.errors import RecipeError, refused_by_rule
from gpt.settings import Settings, architecture_of
from gpt.stages import pipeline_settings, pipeline_stage, seed_weights, take_weights
from gpt.streams import graph_stream, on_stream, prepare_random_states
from gpt.tokenizer import padded_vocab_size
from overlap_train import OverlapConfig
from overlap_train.integrations.megatron import enable, gpt_block_spec

ACTIVATIONS = {"silu": F.silu}
DENSE_ONLY = ("fc1", "fc2")  # the linears that experts have in their place


@dataclass(frozen=True)
class Model:
    """`bare` owns the parameters and the checkpoint keys; `trained` is the same model in Megatron's wrappers."""

    bare: GPTModel
    trained: DistributedDataParallel
    config: TransformerConfig
    stream: torch.cuda.Stream | None = None  # the one to train in, with --cuda-graph 1


Change = Callable[[GPTModel], None]


def build_model(
    settings: Settings, overlap: OverlapConfig | None, device: torch.device, change: Change | None = None
) -> Model:
    """Build it on `device`: bf16 on a GPU, fp32 on the CPU, with overlapped linears where `overlap` is given.

    `change` is called with the bare model before anything wraps it. The initial weights depend on `settings.seed` only;
    those of the small model are the same for every `tp` and `pp`. Raises RecipeError where enable() refuses.
    """
    on_gpu = device.type == "cuda"
    prepare_random_states(settings)
    bare = stage_of_model(settings, on_gpu).to(device)
    if overlap is not None:
        with refused_by_rule():
            enable(bare, overlapped_part(overlap, architecture_of(settings)))
    if change is not None:
        change(bare)
    config = bare.config
    wrapped = Float16Module(config, bare) if on_gpu else bare
    stream = graph_stream(settings)
    with on_stream(stream):
        trained = DistributedDataParallel(config, ddp_config(on_gpu), wrapped)
    return Model(bare, trained, config, stream)


def stage_of_model(settings: Settings, on_gpu: bool) -> GPTModel:
    """`bare_model` with its initial weights. Each stage of the small model takes its part of the whole model's."""
    is_part, is_small = settings.pp > 1, settings.model == SMALL
    seed_weights(settings.seed if is_small else settings.seed + 100 * pipeline_stage(settings))  # as Megatron-LM has it
    if not (is_part and is_small):
        return bare_model(settings, on_gpu)
    whole, part = bare_model(replace(settings, pp=1), on_gpu), bare_model(settings, on_gpu)
    take_weights(part, whole)
    return part


def bare_model(settings: Settings, on_gpu: bool) -> GPTModel:
    """Megatron's model of the architecture that the settings ask for, with our norm and attention.

    With pipeline stages, what this rank's stage has of it; the whole model where `settings.pp` is 1.
    """
    if architecture_of(settings).experts and not on_gpu:
        raise RecipeError(f"--model {settings.model} has experts, which Megatron-Core runs on GPUs only")
    config, stage = transformer_config(settings, on_gpu), pipeline_stage(settings)
    return GPTModel(
        config,
        gpt_block_spec(config),
        vocab_size=padded_vocab_size(settings.tp, architecture_of(settings).vocab_size),
        max_sequence_length=settings.seq_length,
        pre_process=stage == 0,
        post_process=stage == settings.pp - 1,
        position_embedding_type="rope",
        rotary_base=architecture_of(settings).rope_base,
        share_embeddings_and_output_weights=False,
    )


def overlapped_part(overlap: OverlapConfig, architecture: Architecture) -> OverlapConfig:
    """What can overlap in this architecture: experts have no fc1 and fc2 whose input is gathered."""
    if not architecture.experts:
        return overlap
    return replace(overlap, slots=tuple(slot for slot in overlap.slots if slot not in DENSE_ONLY))


def transformer_config(settings: Settings, on_gpu: bool) -> TransformerConfig:
    """Megatron's description of the model. No dropout, so a resumed run needs no random state."""
    architecture, dtype = architecture_of(settings), torch.bfloat16 if on_gpu else torch.float32
    return TransformerConfig(
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        ffn_hidden_size=settings.ffn_hidden_size,
        num_attention_heads=settings.num_attention_heads,
        num_query_groups=settings.num_query_groups,
        tensor_model_parallel_size=settings.tp,
        sequence_parallel=settings.tp > 1,
        **pipeline_settings(settings, dtype),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=ACTIVATIONS[architecture.activation],
        kv_channels=architecture.head_width,
        layernorm_epsilon=architecture.norm_eps,
        qk_layernorm=architecture.has_qk_norm,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=on_gpu,
        params_dtype=dtype,
        # Micro-batches of several lengths: every byte of a step weighs the same, not every micro-batch.
        calculate_per_token_loss=settings.variable_seq_length > 0,
        # Weights of the small model are drawn on the CPU and then cut, so that they are the same for every
        # tensor-parallel size; billions of them would take minutes.
        use_cpu_initialization=settings.model == SMALL,
        deterministic_mode=settings.deterministic > 0,
        # Fusions that need Apex, or a compiler on the user's machine, stay off.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        moe_token_dispatcher_type="alltoall",  # the default is refused with variable_seq_lengths, experts or not
        **expert_settings(architecture),
        **recompute_settings(settings),
    )


def recompute_settings(settings: Settings) -> dict[str, Any]:
    """Which activations backward makes again; of a whole layer only the input is kept."""
    if settings.recompute == "none":
        return {}
    layers = {"recompute_method": "uniform", "recompute_num_layers": 1} if settings.recompute == "full" else {}
    return {"recompute_granularity": settings.recompute, **layers}


def expert_settings(architecture: Architecture) -> dict[str, Any]:
    """Experts side by side on every rank, each cut by tensor parallelism; none for a dense model."""
    if not architecture.experts:
        return {}
    return {
        "num_moe_experts": architecture.experts,
        "moe_router_topk": architecture.experts_per_token,
        "moe_ffn_hidden_size": architecture.ffn_hidden_size,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": architecture.expert_balance,
    }


def ddp_config(on_gpu: bool) -> DistributedDataParallelConfig:
    """fp32 gradients; on GPUs reduced under the backward pass and sharded for the distributed optimizer."""
    overlapped = on_gpu and parallel_state.get_data_parallel_world_size() > 1
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlapped, use_distributed_optimizer=on_gpu
    )
