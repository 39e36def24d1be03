"""What is compared: the same model with its linears overlapped and not, of whose modules, and how the ranks are divided."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from gpt.graph import with_graph
from gpt.model import OURS, Modules, build_model
from gpt.rules import graph_problem
from gpt.settings import Settings
from gpt.training import Trainer, build_trainer
from mfu.alone import parallel_linears
from mfu.current import Layout, Layouts, Userbuffers
from mfu.names import (
    ASYNC_TP,
    DATA_PARALLEL,
    GRAPHS,
    MEGATRON,
    NCCL,
    OVERLAP,
    TE,
    TE_OVERLAP,
    TE_RING,
    USERBUFFERS,
    bare,
    is_transformer_engine,
)
from overlap_train import OverlapConfig
from overlap_train.tools.bench.async_tp import AsyncColumn, AsyncRow

ALONE = (MEGATRON, DATA_PARALLEL, TE)  # also run where there is nothing to overlap


@dataclass(frozen=True)
class Built:
    """A trainer, and what its steps need: `layout` in use. main_grad: where weight gradients go, as OverlapConfig.main_grad says
    it."""

    trainer: Trainer
    main_grad: str
    layout: Layout
    userbuffers: Userbuffers | None


def obstacle(name: str, settings: Settings, device: torch.device) -> str | None:
    """Why a variant, or its repetition, cannot run here, or None."""
    variant = bare(name)
    if variant in GRAPHS:
        problem = "CUDA graphs need CUDA devices" if device.type != "cuda" else graph_problem(settings)
        return problem or obstacle(GRAPHS[variant], settings, device)
    if is_transformer_engine(variant) and not megatron_te.HAVE_TE:
        return (
            "TransformerEngine is not installed; install it (pip install --no-build-isolation 'transformer_engine[pytorch]'), "
            "or leave this variant out of --variants"
        )
    if settings.tp == settings.cp == 1 and variant not in ALONE:
        return "tensor-parallel size 1: nothing to overlap"
    if variant == ASYNC_TP and device.type != "cuda":
        return "PyTorch's async-TP needs CUDA devices"
    return None


def settings_of(name: str, settings: Settings) -> Settings:
    """The settings of one variant. Some have a CUDA graph, and one has no context parallelism."""
    variant = bare(name)
    return replace(settings, cuda_graph=int(variant in GRAPHS), cp=1 if variant == DATA_PARALLEL else settings.cp)


def build_variant(
    name: str, settings: Settings, overlap: OverlapConfig, device: torch.device, layouts: Layouts
) -> Built:
    """Build a variant's trainer, its layout in use. Collective. Raises RecipeError where enable() refuses."""
    settings, variant = settings_of(name, settings), GRAPHS.get(bare(name), bare(name))
    layout, userbuffers = layouts.use(settings), None
    config, change = overlap_of(variant, overlap), use_async_tp if variant == ASYNC_TP else None
    if variant in USERBUFFERS:
        userbuffers = layouts.userbuffers(settings)
        names = userbuffers.RING if variant == TE_RING else userbuffers.DEFAULT
        change = partial(userbuffers.name, names=names)
    model = build_model(settings, config, device, change, modules_of(variant))
    # Baselines return their weight gradients, and DDP adds them; so do our linears on TransformerEngine's modules.
    main_grad = "off" if config is None or variant == TE_OVERLAP else config.main_grad
    return Built(with_graph(build_trainer(settings, model)), main_grad, layout, userbuffers)


def overlap_of(variant: str, overlap: OverlapConfig) -> OverlapConfig | None:
    """The settings of a variant's overlapped linears; None: it has none."""
    if variant in (MEGATRON, ASYNC_TP, DATA_PARALLEL, TE, *USERBUFFERS):
        return None
    if variant in (OVERLAP, TE_OVERLAP):
        return overlap
    return overlap.by("collective" if variant == NCCL else variant)


def modules_of(variant: str) -> Modules:
    """The modules that a variant is built of. TransformerEngine's overlap by userbuffers if their config says so at that time."""
    if not is_transformer_engine(variant):
        return OURS
    spec = partial(get_gpt_decoder_block_spec, use_transformer_engine=True)
    userbuffers = {"tp_comm_overlap": True, "tp_comm_overlap_rs_dgrad": variant == TE_RING}
    return Modules(spec, userbuffers if variant in USERBUFFERS else {})


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
