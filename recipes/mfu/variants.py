"""How each variant is built: the same model with its linears overlapped and not, and of whose modules."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from gpt.model import OURS, Modules, build_model
from gpt.settings import Settings, graph_problem
from gpt.training import Trainer, build_trainer
from mfu.alone import parallel_linears
from mfu.names import GRAPHS, USERBUFFERS, bare, is_transformer_engine
from overlap_train import OverlapConfig
from overlap_train.tools.bench.async_tp import AsyncColumn, AsyncRow


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
    if settings.tp == settings.cp == 1 and variant not in ("megatron", "te"):
        return "tensor-parallel size 1: nothing to overlap"
    if variant == "async_tp" and device.type != "cuda":
        return "PyTorch's async-TP needs CUDA devices"
    return None


def build_variant(name: str, settings: Settings, overlap: OverlapConfig, device: torch.device) -> Trainer:
    """Build a variant's trainer; collective. Raises RecipeError where enable() refuses."""
    variant, change, modules = GRAPHS.get(bare(name), bare(name)), None, OURS
    if variant == "async_tp":
        change = use_async_tp
    if variant in USERBUFFERS:
        change = partial(name_userbuffers, settings=settings, is_ring=variant == USERBUFFERS[1])
    if is_transformer_engine(variant):
        own = {"tp_comm_overlap": True, "tp_comm_overlap_rs_dgrad": variant == USERBUFFERS[1]}
        spec = partial(get_gpt_decoder_block_spec, use_transformer_engine=True)
        modules = Modules(spec, own if variant in USERBUFFERS else {})
    settings = replace(settings, cuda_graph=int(bare(name) in GRAPHS))
    return build_trainer(settings, build_model(settings, overlap_of(variant, overlap), device, change, modules))


def overlap_of(variant: str, overlap: OverlapConfig) -> OverlapConfig | None:
    """The settings of a variant's overlapped linears; None: it has none."""
    if variant in ("megatron", "async_tp", "te", *USERBUFFERS):
        return None
    if variant in ("overlap", "te_overlap"):
        return overlap
    return overlap.by("collective" if variant == "nccl" else variant)


def adds_in_place(name: str, settings: Settings, overlap: OverlapConfig) -> bool:
    """Whether a variant's linears add weight gradients into main_grad inside the GEMM."""
    config = overlap_of(GRAPHS.get(bare(name), bare(name)), overlap)
    return settings.accumulation_fusion if config is None else config.main_grad == "accumulate"


def name_userbuffers(model: GPTModel, settings: Settings, is_ring: bool) -> None:
    """Let a model's linears take TransformerEngine's communication buffers, made as Megatron-LM makes them (--tp-comm-overlap).

    Needs TransformerEngine 2.7 or newer. A process can have one set, which has a communicator for each product of a transformer,
    by name. So one set has both configurations: linears named fc1 and fc2 run by TransformerEngine's defaults, qkv and proj by
    ring exchange for every scatter.
    """
    base = importlib.import_module("transformer_engine.pytorch.module.base")
    if base._ub_communicators is None:
        ring = dict(method="ring_exchange", num_sm=1, cga_size=1, set_sm_margin=False, num_splits=settings.tp)
        base.initialize_ub(
            shape=[settings.seq_length * settings.micro_batch_size, settings.hidden_size],
            tp_size=settings.tp,
            quantization_modes=[base.UserBufferQuantizationMode.NONE],
            ub_cfgs={"qkv_dgrad": dict(ring), "proj_fprop": dict(ring)},
            bootstrap_backend="nccl",
        )
    column, row = ("qkv", "proj") if is_ring else ("fc1", "fc2")
    for module in model.modules():
        if getattr(module, "ub_name", None) is not None:
            module.ub_name = row if module.parallel_mode == "row" else column


def release_userbuffers() -> None:
    """Free them, if there are any: they must not outlive the process groups."""
    if megatron_te.HAVE_TE:
        importlib.import_module("transformer_engine.pytorch.module.base").destroy_ub()


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
