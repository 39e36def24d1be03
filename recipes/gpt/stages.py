"""Pipeline stages: which part of the model is here, and weights that do not depend on the number of stages."""

from __future__ import annotations

import re
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel

from gpt.settings import Settings


def pipeline_stage(settings: Settings) -> int:
    """The stage of this rank, from 0; 0 where the settings ask for the whole model."""
    return parallel_state.get_pipeline_model_parallel_rank() if settings.pp > 1 else 0


def pipeline_settings(settings: Settings, dtype: torch.dtype) -> dict[str, Any]:
    """What Megatron's config says about stages; nothing for the whole model.

    A stage frees its output when it is sent, as in Megatron's own training. Where micro-batches differ in length, the
    stages tell each other the shape of each.
    """
    if settings.pp == 1:
        return {}
    return {
        "pipeline_model_parallel_size": settings.pp,
        "pipeline_dtype": dtype,
        "deallocate_pipeline_outputs": True,
        "variable_seq_lengths": settings.variable_seq_length > 0,
    }


def seed_weights(seed: int) -> None:
    """Seed the generators that weights are drawn from, on the CPU and on the GPU."""
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)


@torch.no_grad()
def take_weights(part: GPTModel, whole: GPTModel) -> None:
    """Copy the parameters of a stage from the whole model, whose layers have other numbers."""
    first = part.decoder.layers[0].layer_number - 1
    source = dict(whole.named_parameters())
    for name, parameter in part.named_parameters():
        parameter.copy_(source[re.sub(r"layers\.(\d+)\.", lambda match: f"layers.{int(match[1]) + first}.", name)])
