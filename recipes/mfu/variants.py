"""How each variant is built: the same model with its linears overlapped and not, and of whose modules."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial

import torch
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

from gpt.model import build_model
from gpt.settings import Settings, graph_problem
from gpt.training import Trainer, build_trainer
from mfu.linears import use_async_tp
from mfu.plan import GRAPHS, USERBUFFERS, bare, is_graph, is_transformer_engine
from overlap_train import OverlapConfig


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
    variant = GRAPHS.get(bare(name), bare(name))
    settings = replace(settings, cuda_graph=int(is_graph(name)))
    build = partial(build_model, settings, overlap_of(variant, overlap), device)
    if is_transformer_engine(variant):
        ring = variant == USERBUFFERS[1]
        own = {"tp_comm_overlap": True, "tp_comm_overlap_rs_dgrad": ring} if variant in USERBUFFERS else {}
        model = build(partial(get_gpt_decoder_block_spec, use_transformer_engine=True), own)
        if variant in USERBUFFERS:
            name_userbuffers(model, settings, ring)
    else:
        model = use_async_tp(build()) if variant == "async_tp" else build()
    return build_trainer(settings, model)


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
    return settings.gradient_accumulation_fusion if config is None else config.main_grad == "accumulate"


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
