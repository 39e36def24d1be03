"""The model: Megatron's GPTModel with RMSNorm, SwiGLU, RoPE, GQA and sequence parallelism, wrapped for training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from gpt.errors import refused_by_rule
from gpt.settings import Settings
from gpt.tokenizer import padded_vocab_size
from overlap_train import OverlapConfig
from overlap_train.integrations.megatron import enable, gpt_block_spec


@dataclass(frozen=True)
class Model:
    """`bare` owns the parameters and the checkpoint keys; `trained` is the same model in Megatron's wrappers."""

    bare: GPTModel
    trained: DistributedDataParallel
    config: TransformerConfig


def build_model(settings: Settings, overlap: OverlapConfig | None, device: torch.device) -> Model:
    """Build it on `device`: bf16 on a GPU, fp32 on the CPU, with overlapped linears where `overlap` is given.

    The initial weights depend on `settings.seed` only, not on `settings.tp`. Raises RecipeError where enable() refuses.
    """
    on_gpu = device.type == "cuda"
    tensor_parallel.model_parallel_cuda_manual_seed(settings.seed)
    torch.manual_seed(settings.seed)
    config = transformer_config(settings, on_gpu)
    bare = GPTModel(
        config,
        gpt_block_spec(config),
        vocab_size=padded_vocab_size(settings.tp),
        max_sequence_length=settings.seq_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).to(device)
    if overlap is not None:
        with refused_by_rule():
            enable(bare, overlap)
    wrapped = Float16Module(config, bare) if on_gpu else bare
    return Model(bare, DistributedDataParallel(config, ddp_config(on_gpu), wrapped), config)


def transformer_config(settings: Settings, on_gpu: bool) -> TransformerConfig:
    """Megatron's description of the model. No dropout, so a resumed run needs no random state."""
    return TransformerConfig(
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        ffn_hidden_size=settings.ffn_hidden_size,
        num_attention_heads=settings.num_attention_heads,
        num_query_groups=settings.num_query_groups,
        tensor_model_parallel_size=settings.tp,
        sequence_parallel=settings.tp > 1,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=on_gpu,
        params_dtype=torch.bfloat16 if on_gpu else torch.float32,
        # Weights are drawn on the CPU and then cut, so that they are the same for every tensor-parallel size.
        use_cpu_initialization=True,
        # Fusions that need Apex, or a compiler on the user's machine, stay off.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )


def ddp_config(on_gpu: bool) -> DistributedDataParallelConfig:
    """fp32 gradients; on GPUs reduced under the backward pass and sharded for the distributed optimizer."""
    overlapped = on_gpu and parallel_state.get_data_parallel_world_size() > 1
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlapped, use_distributed_optimizer=on_gpu
    )
