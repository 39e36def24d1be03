"""Megatron's gradient accumulation fusion without Apex.

With `gradient_accumulation_fusion` Megatron adds weight gradients into `weight.main_grad` by the extension
`fused_weight_gradient_mlp_cuda`. Apex compiles it, no wheel brings it, and without it Megatron refuses to build linears with that
setting. torch multiplies 16-bit matrices into an fp32 sum itself (`addmm` with `out_dtype`): a module of that name that calls it
serves Megatron's own linears, the output layer among them, and overlapped ones where a call falls back.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from overlap_train.ops.wgrad import accumulate

EXTENSION = "fused_weight_gradient_mlp_cuda"
_LAYERS = "megatron.core.tensor_parallel.layers"


def provide_accumulation_fusion() -> bool:
    """Let `gradient_accumulation_fusion=True` work in this process, for models that are built from now on.

    The launcher calls it, and so does the import of `enable`.

    Returns:
        Whether our module serves; False where the extension itself loads.
    """
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
