"""Which weight gradients go straight into `weight.main_grad`, and the fusion without Apex.

Megatron's DDP gives every parameter a buffer `main_grad`, fp32 or 16-bit, and a mark `grad_added_to_main_grad`, with which its
hook ignores `weight.grad`. overlap_train/ops/wgrad.py sets the mark where nobody has returned a gradient beside ours.

With `gradient_accumulation_fusion` Megatron adds there itself, and sets the mark whatever others return. It does so by an
extension, `fused_weight_gradient_mlp_cuda`, which Apex compiles and no wheel brings. Without it Megatron refuses to build linears
with that setting. A module of that name that calls torch serves the linears of Megatron, and overlapped ones where a call falls
back.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from overlap_train.ops.wgrad import accumulate, is_watched

if TYPE_CHECKING:
    from overlap_train import OverlapConfig


def accumulates(linear: Any, weight: torch.Tensor, config: OverlapConfig) -> bool:
    """Whether overlapped calls of `linear` add their weight gradient into weight.main_grad.

    True where config.main_grad asks for it and somebody looks for the gradient there. With gradient accumulation fusion that is
    so for every dtype of main_grad, as in Megatron. Without it DDP looks there, which marks the parameter; a 16-bit main_grad is
    left to DDP's hook. FSDP's is left to FSDP.
    """
    main_grad = getattr(weight, "main_grad", None)
    if config.main_grad != "accumulate" or main_grad is None:
        return False
    if getattr(weight, "__fsdp_param__", False):
        return False
    if linear.gradient_accumulation_fusion:
        return True
    return main_grad.dtype == torch.float32 and hasattr(weight, "grad_added_to_main_grad")


def is_fused(linear: Any, weight: torch.Tensor) -> bool:
    """Whether a call that falls back may add into main_grad by Megatron's gradient accumulation fusion, which drops what others
    return: where overlapped calls add there and nobody has a hook, and not of a later pipeline stage whose multi-token prediction
    embeds by this weight. No call of FSDP's weights overlaps."""
    if not linear.gradient_accumulation_fusion or getattr(weight, "__fsdp_param__", False):
        return linear.gradient_accumulation_fusion
    embeds = getattr(weight, "shared_embedding", False) and bool(getattr(linear.config, "mtp_num_layers", None))
    embeds = embeds and not getattr(weight, "zero_out_wgrad", False)  # which Megatron sets with one stage
    return accumulates(linear, weight, linear.overlap.config) and not is_watched(weight) and not embeds


def fused_alike(linear: Any, weight: torch.Tensor, call: Mapping[str, Any]) -> dict[str, Any]:
    """`call`, keyword arguments of Megatron's product in a call that falls back, with the fusion only where `is_fused`, or where
    the gradient is deferred: Megatron does that with the fusion only."""
    if call.get("grad_output_buffer") is not None:
        return dict(call)
    return {**call, "gradient_accumulation_fusion": is_fused(linear, weight)}


EXTENSION = "fused_weight_gradient_mlp_cuda"
_LAYERS = "megatron.core.tensor_parallel.layers"


def provide_accumulation_fusion() -> bool:
    """Let `gradient_accumulation_fusion=True` work in this process, for models that are built from now on. Returns whether our
    module serves, and not the extension itself. The launcher calls it, and so does the import of `enable`."""
    extension, layers = _extension(), sys.modules.get(_LAYERS)
    if layers is not None and not getattr(layers, "_grad_accum_fusion_available", True):  # imported before
        layers.fused_weight_gradient_mlp_cuda = extension  # type: ignore[attr-defined]
        layers._grad_accum_fusion_available = True  # type: ignore[attr-defined]
    return getattr(getattr(extension, "__spec__", None), "origin", None) == __name__


def _extension() -> ModuleType:
    """The extension. Where it is missing or does not load, as one that was built for another torch: our module, in its place."""
    try:
        return importlib.import_module(EXTENSION)
    except (ImportError, OSError):  # OSError: of the loader, for a library that the extension needs
        sys.modules[EXTENSION] = stand_in = _stand_in()
        return stand_in


def _stand_in() -> ModuleType:
    # With a spec: without one importlib.util.find_spec, by which libraries look for the extension, raises ValueError.
    module = importlib.util.module_from_spec(ModuleSpec(EXTENSION, None, origin=__name__))
    for name in ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"):
        setattr(module, name, _add_weight_gradient)
    return module


def _add_weight_gradient(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
    """main_grad [N, K] += dy [M, N].T @ x [M, K], as the extension's functions do."""
    accumulate(main_grad, dy, x)
