"""Variants on TransformerEngine's modules: alone, with its userbuffers by either configuration, and with our linears."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

from gpt.model import build_model
from gpt.program import RecipeError
from gpt.settings import Settings
from mfu.plan import USERBUFFERS
from overlap_train import OverlapConfig

BASE = "transformer_engine.pytorch.module.base"


def build(
    name: str, fp8: str, settings: Settings, overlap: OverlapConfig | None, device: torch.device
) -> GPTModel:  # fmt: skip
    """The model of a variant; collective. fp8: TransformerEngine's recipe, or "off". Raises RecipeError without
    TransformerEngine."""
    if not HAVE_TE:
        raise RecipeError(f"--variants {name}: TransformerEngine is not installed; leave this variant out")
    is_ring = name == "te_userbuffers_ring"
    own: dict[str, Any] = {} if fp8 == "off" else {"fp8": "e4m3" if fp8 == "blockwise" else "hybrid", "fp8_recipe": fp8}
    if name in USERBUFFERS:
        own |= {"tp_comm_overlap": True, "tp_comm_overlap_rs_dgrad": is_ring}
    spec = get_gpt_decoder_block_spec
    model = build_model(settings, overlap, device, lambda config: spec(config, use_transformer_engine=True), own)
    if name in USERBUFFERS:
        _name_userbuffers(model, settings, is_ring, fp8 != "off")
    return model


def release() -> None:
    """Userbuffers must not outlive the process groups."""
    if HAVE_TE:
        importlib.import_module(BASE).destroy_ub()


def _name_userbuffers(model: GPTModel, settings: Settings, is_ring: bool, in_fp8: bool) -> None:
    """Let a model's linears take TransformerEngine's communication buffers, made as Megatron-LM makes them (--tp-comm-overlap).

    Needs TransformerEngine 2.7 or newer. A process can have one set, which has a communicator for each product of a transformer,
    by name. So one set has both configurations: linears named fc1 and fc2 run by TransformerEngine's defaults, qkv and proj by
    ring exchange for every scatter.
    """
    base = importlib.import_module(BASE)
    if base._ub_communicators is None:
        ring = dict(method="ring_exchange", num_sm=1, cga_size=1, set_sm_margin=False, num_splits=settings.tp)
        base.initialize_ub(
            shape=[settings.seq_length * settings.micro_batch_size, settings.hidden_size],
            tp_size=settings.tp,
            quantization_modes=[getattr(base.UserBufferQuantizationMode, "FP8" if in_fp8 else "NONE")],
            ub_cfgs={"qkv_dgrad": dict(ring), "proj_fprop": dict(ring)},
            bootstrap_backend="nccl",
        )
    column, row = ("qkv", "proj") if is_ring else ("fc1", "fc2")
    for module in model.modules():
        if getattr(module, "ub_name", None) is not None:
            module.ub_name = row if module.parallel_mode == "row" else column
