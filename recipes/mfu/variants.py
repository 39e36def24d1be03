"""What is compared: the same model with its linears overlapped, as Megatron-Core has them, and on PyTorch's async-TP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from gpt.graph import with_graph
from gpt.model import build_model
from gpt.rules import graph_problem
from gpt.settings import Settings
from gpt.training import Trainer, build_trainer
from mfu.alone import parallel_linears
from mfu.plan import AGAIN, ASYNC_TP, GRAPHS, MEGATRON, OVERLAP
from overlap_train import OverlapConfig
from overlap_train.tools.bench.async_tp import AsyncColumn, AsyncRow


def obstacle(variant: str, settings: Settings, device: torch.device) -> str | None:
    """Why a variant cannot run here, or None."""
    if variant in GRAPHS:
        problem = "CUDA graphs need CUDA devices" if device.type != "cuda" else graph_problem(settings)
        return problem or obstacle(GRAPHS[variant], settings, device)
    if settings.tp == 1 and variant != MEGATRON:
        return "tensor-parallel size 1: nothing to overlap"
    if variant == ASYNC_TP and device.type != "cuda":
        return "PyTorch's async-TP needs CUDA devices"
    return None


def build_variant(name: str, settings: Settings, overlap: OverlapConfig, device: torch.device) -> tuple[Trainer, str]:
    """A trainer, and where its weight gradients go, in the words of OverlapConfig.main_grad; collective.

    Baselines return their weight gradients, and DDP adds them. Raises RecipeError where enable() refuses.
    """
    variant = name.removesuffix(AGAIN)
    settings = replace(settings, cuda_graph=int(variant in GRAPHS))
    variant = GRAPHS.get(variant, variant)
    if variant in (MEGATRON, ASYNC_TP):
        change = use_async_tp if variant == ASYNC_TP else None
        return with_graph(build_trainer(settings, build_model(settings, None, device, change))), "off"
    overlap = overlap if variant == OVERLAP else replace(overlap, method=variant)
    return with_graph(build_trainer(settings, build_model(settings, overlap, device))), overlap.main_grad


def use_async_tp(model: GPTModel) -> None:
    """Exchange the classes of the model's parallel linears, as enable() does."""
    for linear in parallel_linears(model):
        linear.__class__ = AsyncColumnLinear if type(linear) is ColumnParallelLinear else AsyncRowLinear


class AsyncColumnLinear(ColumnParallelLinear):
    """x [s/W, b, K] -> [s, b, N/W]."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        y = AsyncColumn.apply(input.flatten(0, 1), weight, self.tp_group)
        return y.view(-1, input.shape[1], y.shape[1])


class AsyncRowLinear(RowParallelLinear):
    """x [s, b, K/W] -> [s/W, b, N]."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        z = AsyncRow.apply(input_.flatten(0, 1), self.weight, self.tp_group)
        return z.view(-1, input_.shape[1], z.shape[1]), None
