"""The model: Megatron's GPTModel with RMSNorm, SwiGLU, RoPE, GQA and sequence parallelism, wrapped for training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from gpt.program import refused_by_rule
from gpt.settings import SMALL, Settings
from overlap_train import OverlapConfig
from overlap_train.integrations.megatron import enable, gpt_block_spec


@dataclass(frozen=True)
class Model:
    """`bare` owns the parameters and the checkpoint keys; `trained` is the same model in Megatron's wrappers."""

    bare: GPTModel
    trained: DistributedDataParallel
    stream: torch.cuda.Stream | None = None  # the one to train in, with --cuda-graph 1


@dataclass(frozen=True)
class Modules:
    """Whose modules a model is built of: a block spec, and what these need in TransformerConfig."""

    block_spec: Callable[[TransformerConfig], Any] = gpt_block_spec
    config: Mapping[str, Any] = field(default_factory=dict)


OURS = Modules()  # our norm and attention, Megatron's linears


def build_model(
    settings: Settings,
    overlap: OverlapConfig | None,
    device: torch.device,
    change: Callable[[GPTModel], None] | None = None,
    modules: Modules = OURS,
) -> Model:
    """Build it on `device`: bf16 on a GPU, fp32 on the CPU, with overlapped linears where `overlap` is given.

    `change` is called with the bare model before anything wraps it. The initial weights depend on `settings.seed` and pp; those
    of the small model are the same for every tp and cp. Raises RecipeError where Megatron-Core or enable() refuses.
    """
    on_gpu, stage = device.type == "cuda", parallel_state.get_pipeline_model_parallel_rank()
    if settings.cuda_graph:  # lets a capture switch between Megatron's random states, which draw the same numbers
        initialize_rng_tracker(use_cudagraphable_rng=True, force_reset=True)
    tensor_parallel.model_parallel_cuda_manual_seed(settings.seed + 100 * stage)  # as Megatron-LM has it
    torch.manual_seed(settings.seed + 100 * stage)
    with refused_by_rule():
        config = transformer_config(settings, on_gpu, modules.config)
        bare = GPTModel(
            config,
            modules.block_spec(config),
            vocab_size=settings.vocabulary_rows,
            max_sequence_length=settings.seq_length,
            pre_process=stage == 0,
            post_process=stage == settings.pp - 1,
            position_embedding_type="rope",
            rotary_base=settings.rope_base,
            share_embeddings_and_output_weights=False,
        ).to(device)
        if overlap is not None:
            if settings.experts:  # in the place of fc1 and fc2
                overlap = replace(overlap, slots=tuple(slot for slot in overlap.slots if slot not in ("fc1", "fc2")))
            enable(bare, overlap)
    if change is not None:
        change(bare)
    # DDP keeps the nodes that collect gradients, and these run in the stream in which DDP was built: the one that is captured.
    stream = torch.cuda.Stream() if settings.cuda_graph else None
    with on_stream(stream):
        wrapped = Float16Module(config, bare) if on_gpu else bare
        return Model(bare, DistributedDataParallel(config, _ddp_config(on_gpu), wrapped), stream)


def _ddp_config(on_gpu: bool) -> DistributedDataParallelConfig:
    """fp32 gradients; on GPUs reduced during the backward pass and sharded for the distributed optimizer."""
    overlapped = on_gpu and parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlapped, use_distributed_optimizer=on_gpu
    )


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Enqueue the block into `stream`: after what the caller's stream has, before what it gets next. None: change nothing."""
    if stream is None:
        yield
        return
    caller = torch.cuda.current_stream()
    stream.wait_stream(caller)
    with torch.cuda.stream(stream):
        yield
    caller.wait_stream(stream)


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
        moe_token_dispatcher_type="alltoall",
        gradient_accumulation_fusion=settings.accumulation_fusion,
        # Fusions that need Apex, or a compiler on the user's machine, stay off.
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        **others,
    )
