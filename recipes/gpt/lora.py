"""Low-rank adapters (LoRA, arXiv 2106.09685) on a model whose own weights are frozen: y = W x + α/r · B A x.

An adapter exchanges r features of a token: A is whole on every rank where W is cut by columns, and B where W is cut by rows. The
frozen linears still exchange all of theirs, in forward and for the input's gradient, while they multiply a third less. So
communication is a larger part of a step than in full training.
"""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
ALPHA = 32


class Whole(torch.nn.Linear):
    """x [s/W, b, in] -> [s/W, b, out] by a weight that every rank has: each knows its gradient from its own part of the sequence
    only, and Megatron adds these up at the end of a step."""

    def __init__(self, features_in: int, features_out: int, config: TransformerConfig) -> None:
        super().__init__(features_in, features_out, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(x), None


class LoRA(MegatronModule):
    """A frozen parallel linear with its adapter; called as the linear is."""

    def __init__(self, linear: ColumnParallelLinear | RowParallelLinear, rank: int, config: TransformerConfig) -> None:
        super().__init__(config)
        self.to_wrap, self.scale = linear, ALPHA / rank
        features_in, features_out = linear.input_size, linear.output_size
        parallel = dict(config=config, init_method=config.init_method, bias=False, skip_bias_add=False)
        if isinstance(linear, ColumnParallelLinear):
            self.a = Whole(features_in, rank, config)
            self.b = ColumnParallelLinear(rank, features_out, gather_output=False, **parallel)
        else:
            self.a = RowParallelLinear(features_in, rank, input_is_parallel=True, **parallel)
            self.b = Whole(rank, features_out, config)
        torch.nn.init.zeros_(self.b.weight)  # the first step begins with the model as it was

    def forward(self, x: torch.Tensor, **given: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        y, bias = self.to_wrap(x, **given)
        return torch.add(y, self.b(self.a(x)[0])[0], alpha=self.scale), bias


def add_adapters(model: GPTModel, rank: int) -> None:
    """Freeze the model, and put an adapter of `rank` features around each linear of its layers."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name in LINEARS:
            if hasattr(module, name):
                setattr(module, name, LoRA(getattr(module, name), rank, model.config))
