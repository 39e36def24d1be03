"""Small GPT models and a few steps of training with Megatron-Core's own DDP, schedule and optimizer, on the CPU."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron import enable, gpt_block_spec
from tests.megatron import layout
from tests.megatron.linears import model_config

VOCABULARY, SEQUENCE, BATCH = 48, 16, 2

LLAMA = dict(
    normalization="RMSNorm",
    gated_linear_unit=True,
    activation_func=torch.nn.functional.silu,
    add_bias_linear=False,
    num_query_groups=2,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
GPT2 = dict(normalization="LayerNorm", hidden_dropout=0.0, attention_dropout=0.0)


@dataclass(frozen=True)
class Recipe:
    """What a test trains: `architecture` are changes to model_config(), the rest says how."""

    architecture: dict[str, Any]
    tensor_parallel: int = 2
    overlap: OverlapConfig | None = None
    tied: bool = False
    microbatches: int = 2
    overlap_grad_reduce: bool = False
    positions: str = "rope"


def gpt(recipe: Recipe) -> GPTModel:
    """The model of a recipe; the same full weights for every tensor-parallel size and with overlap or without."""
    layout.use(recipe.tensor_parallel)
    parallel = recipe.tensor_parallel > 1
    config = model_config(
        tensor_model_parallel_size=recipe.tensor_parallel, sequence_parallel=parallel, **recipe.architecture
    )
    config.finalize_model_grads_func = finalize_model_grads
    model = GPTModel(
        config=config,
        transformer_layer_spec=gpt_block_spec(config),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=recipe.tied,
        position_embedding_type=recipe.positions,
    )
    if recipe.overlap is not None:
        quietly_enable(model, recipe.overlap)
    return model


def quietly_enable(model: GPTModel | list[GPTModel], config: OverlapConfig) -> str:
    """enable() and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        enable(model, config)
    return printed.getvalue()


def wrap(recipe: Recipe, model: GPTModel) -> DistributedDataParallel:
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=recipe.overlap_grad_reduce, use_distributed_optimizer=False
    )
    return DistributedDataParallel(model.config, settings, model)


def batches(seed: int = 0) -> Iterator[torch.Tensor]:
    """Token sequences [BATCH, SEQUENCE + 1], the same on every rank: counting up from a random start, so easy to
    learn."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        yield (start + torch.arange(SEQUENCE + 1)) % VOCABULARY


def forward_step(data: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """What Megatron's schedules call for each microbatch."""
    tokens = next(data)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])

    def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return losses.mean(), {"loss": losses.detach().mean()}

    return losses, mean


def forward_backward(recipe: Recipe, model: DistributedDataParallel, data: Iterator[torch.Tensor]) -> float:
    """All microbatches of one step, gradients reduced; returns the mean loss."""
    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=recipe.microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    return sum(result["loss"].item() for result in results) / len(results)


def optimizer_of(model: DistributedDataParallel) -> Any:
    settings = OptimizerConfig(optimizer="adam", lr=3e-3, params_dtype=torch.float32, clip_grad=1.0)
    return get_megatron_optimizer(settings, [model])


def train(recipe: Recipe, steps: int) -> tuple[list[float], DistributedDataParallel]:
    """Losses of the steps, and the model after them."""
    model = wrap(recipe, gpt(recipe))
    optimizer, data, losses = optimizer_of(model), batches(), []
    for _ in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(forward_backward(recipe, model, data))
        successful, _, _ = optimizer.step()
        assert successful
    return losses, model


def gradients(recipe: Recipe) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and reduced main_grad of every parameter after one step's microbatches, and no optimizer step."""
    model = wrap(recipe, gpt(recipe))
    model.zero_grad_buffer()
    loss = forward_backward(recipe, model, batches())
    return loss, {name: p.main_grad.clone() for name, p in model.module.named_parameters()}
