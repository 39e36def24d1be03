"""What is compared: the same model with its linears overlapped, as Megatron-Core has them, and on PyTorch's async-TP;
the first two also with their passes in a CUDA graph."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from gpt.model import Model, build_model
from gpt.rules import graph_problem
from gpt.settings import Settings
from mfu.alone import parallel_linears
from mfu.plan import ASYNC_TP, GRAPHS, MEGATRON, OVERLAP, USERBUFFERS
from overlap_train import OverlapConfig
from overlap_train.bench.async_tp import AsyncColumn, AsyncRow
from overlap_train.config import METHODS


def obstacle(variant: str, settings: Settings, device: torch.device) -> str | None:
    """Why a variant cannot run here, or None."""
    if variant in GRAPHS:
        problem = "CUDA graphs need CUDA devices" if device.type != "cuda" else graph_problem(settings)
        return problem or obstacle(GRAPHS[variant], settings, device)
    if settings.tp == 1 and variant != MEGATRON:
        return "tensor-parallel size 1: nothing to overlap"
    if variant == ASYNC_TP and device.type != "cuda":
        return "PyTorch's async-TP needs CUDA devices"
    if variant == USERBUFFERS:
        if importlib.util.find_spec("transformer_engine") is None:
            return "transformer_engine is not installed"
        return "transformer_engine is installed, but this program does not drive its userbuffers"
    return None


def build(variant: str, settings: Settings, overlap: OverlapConfig, device: torch.device) -> Model:
    """The model of a variant; collective. Raises RecipeError where enable() refuses.

    Args:
        settings: as `settings_of` returns them.
    """
    variant = GRAPHS.get(variant, variant)
    if variant == MEGATRON:
        return build_model(settings, None, device)
    if variant == ASYNC_TP:
        return build_model(settings, None, device, change=use_async_tp)
    return build_model(settings, overlap_of(variant, overlap), device)


def settings_of(variant: str, settings: Settings) -> Settings:
    """The recipe settings of a variant."""
    return replace(settings, cuda_graph=1) if variant in GRAPHS else settings


def overlap_of(variant: str, overlap: OverlapConfig) -> OverlapConfig:
    """The settings of an overlapped variant: those of the flags, or with the method that the variant is named after."""
    if variant == OVERLAP:
        return overlap
    assert variant in METHODS, variant
    return replace(overlap, method=variant)


def main_grad_of(variant: str, overlap: OverlapConfig) -> str:
    """Where the variant's weight gradients go, in the words of OverlapConfig. Rivals return them, and DDP adds them."""
    variant = GRAPHS.get(variant, variant)
    return "off" if variant in (MEGATRON, ASYNC_TP) else overlap.main_grad


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
