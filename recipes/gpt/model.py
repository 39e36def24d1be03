"""The model: Megatron's GPTModel with RMSNorm, SwiGLU, RoPE, GQA and sequence parallelism, wrapped for training."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from gpt.program import RecipeError, refused_by_rule
from gpt.settings import SMALL, Settings
from gpt.streams import on_stream, prepare_random_states
from overlap_train import OverlapConfig
from overlap_train.integrations.megatron import enable, gpt_block_spec

DENSE_ONLY = ("fc1", "fc2")  # the linears that experts have in their place


@dataclass(frozen=True)
class Model:
    """`bare` owns the parameters and the checkpoint keys; `trained` is the same model in Megatron's wrappers."""

    bare: GPTModel
    trained: DistributedDataParallel
    config: TransformerConfig
    stream: torch.cuda.Stream | None = None  # the one to train in, with --cuda-graph 1


@dataclass(frozen=True)
class Modules:
    """Whose modules a model is built of: a block spec, and what these need in TransformerConfig."""

    block_spec: Callable[[TransformerConfig], Any] = gpt_block_spec
    config: Mapping[str, Any] = field(default_factory=dict)


Change = Callable[[GPTModel], None]
OURS = Modules()  # our norm and attention, Megatron's linears


def build_model(
    settings: Settings,
    overlap: OverlapConfig | None,
    device: torch.device,
    change: Change | None = None,
    modules: Modules = OURS,
) -> Model:
    """Build it on `device`: bf16 on a GPU, fp32 on the CPU, with overlapped linears where `overlap` is given.

    `change` is called with the bare model before anything wraps it. The initial weights depend on `settings.seed` only;
    those of the small model are the same for every `tp`, `cp` and `pp`. Raises RecipeError where enable() refuses.
    """
    on_gpu = device.type == "cuda"
    prepare_random_states(settings)
    bare = _with_weights(settings, on_gpu, modules).to(device)
    if overlap is not None:
        if settings.experts:
            overlap = replace(overlap, slots=tuple(slot for slot in overlap.slots if slot not in DENSE_ONLY))
        with refused_by_rule():
            enable(bare, overlap)
    if change is not None:
        change(bare)
    config, stream = bare.config, torch.cuda.Stream() if settings.cuda_graph else None
    with on_stream(stream):
        trained = DistributedDataParallel(config, _ddp_config(on_gpu), Float16Module(config, bare) if on_gpu else bare)
    return Model(bare, trained, config, stream)


def _ddp_config(on_gpu: bool) -> DistributedDataParallelConfig:
    """fp32 gradients; on GPUs reduced during the backward pass and sharded for the distributed optimizer."""
    overlapped = on_gpu and parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlapped, use_distributed_optimizer=on_gpu
    )


def _with_weights(settings: Settings, on_gpu: bool, modules: Modules) -> GPTModel:
    """`bare_model` with its initial weights. Each stage of the small model takes its part of the whole model's."""
    is_small = settings.model == SMALL
    seed = settings.seed if is_small else settings.seed + 100 * _stage(settings)  # as Megatron-LM has it
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    if settings.pp == 1 or not is_small:
        return bare_model(settings, on_gpu, modules)
    whole, part = bare_model(replace(settings, pp=1), on_gpu, modules), bare_model(settings, on_gpu, modules)
    _take_weights(part, whole)
    return part


@torch.no_grad()
def _take_weights(part: GPTModel, whole: GPTModel) -> None:
    """Copy the parameters of a stage from the whole model, whose layers have other numbers."""
    first = part.decoder.layers[0].layer_number - 1
    source = dict(whole.named_parameters())
    for name, parameter in part.named_parameters():
        parameter.copy_(source[re.sub(r"layers\.(\d+)\.", lambda match: f"layers.{int(match[1]) + first}.", name)])


def bare_model(settings: Settings, on_gpu: bool, modules: Modules = OURS) -> GPTModel:
    """Megatron's model that the settings describe: the whole, or this rank's pipeline stage."""
    if settings.experts and not on_gpu:
        raise RecipeError(f"--model {settings.model} has experts, which Megatron-Core runs on GPUs only")
    config, stage = transformer_config(settings, on_gpu, modules.config), _stage(settings)
    return GPTModel(
        config,
        modules.block_spec(config),
        vocab_size=settings.vocabulary_rows,
        max_sequence_length=settings.seq_length,
        pre_process=stage == 0,
        post_process=stage == settings.pp - 1,
        position_embedding_type="rope",
        rotary_base=settings.rope_base,
        share_embeddings_and_output_weights=False,
    )


def _stage(settings: Settings) -> int:
    """The pipeline stage of this rank; 0 where the settings ask for the whole model."""
    return parallel_state.get_pipeline_model_parallel_rank() if settings.pp > 1 else 0


def transformer_config(settings: Settings, on_gpu: bool, others: Mapping[str, Any] = OURS.config) -> TransformerConfig:
    """Megatron's description of the model, with these other fields. No dropout, so a resumed run needs no random state."""
    dtype = torch.bfloat16 if on_gpu else torch.float32
    several_stages, is_full = settings.pp > 1, settings.recompute == "full"
    return TransformerConfig(
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        ffn_hidden_size=settings.ffn_hidden_size,
        num_attention_heads=settings.num_attention_heads,
        num_query_groups=settings.num_query_groups,
        kv_channels=settings.head_width,
        normalization="RMSNorm",
        layernorm_epsilon=settings.norm_eps,
        qk_layernorm=settings.has_qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=on_gpu,
        params_dtype=dtype,
        tensor_model_parallel_size=settings.tp,
        sequence_parallel=settings.tp > 1,
        context_parallel_size=settings.cp,
        cp_comm_type="a2a" if settings.cp > 1 else None,
        pipeline_model_parallel_size=settings.pp,
        pipeline_dtype=dtype if several_stages else None,
        deallocate_pipeline_outputs=several_stages,  # as in Megatron's own training
        variable_seq_lengths=several_stages and settings.variable_seq_length > 0,
        # Micro-batches of several lengths: every byte of a step weighs the same, not every micro-batch.
        calculate_per_token_loss=settings.variable_seq_length > 0,
        # Weights of the small model are drawn on the CPU and then cut, so that they are the same for every
        # tensor-parallel size; billions of them would take minutes.
        use_cpu_initialization=settings.model == SMALL,
        deterministic_mode=settings.deterministic > 0,
        recompute_granularity=None if settings.recompute == "none" else settings.recompute,
        recompute_method="uniform" if is_full else None,  # of a whole layer only the input is kept
        recompute_num_layers=1 if is_full else None,
        # Experts side by side on every rank, each cut by tensor parallelism.
        num_moe_experts=settings.experts or None,
        moe_ffn_hidden_size=settings.ffn_hidden_size if settings.experts else None,
        moe_router_topk=settings.experts_per_token or 2,
        moe_aux_loss_coeff=settings.expert_balance,
        moe_token_dispatcher_type="alltoall",  # the default is refused with variable_seq_lengths, experts or not
        # Fusions that need Apex, or a compiler on the user's machine, stay off.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        **others,
    )
