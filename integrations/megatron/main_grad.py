"""Which weight gradients go straight into `weight.main_grad`, how calls that fall back join in, and the fusion without Apex.

Megatron's DDP gives every parameter a buffer `main_grad`, fp32 or 16-bit, and a mark `grad_added_to_main_grad`. A backward that
has added its gradient there sets the mark, and DDP's hook then ignores `weight.grad` until the next zero_grad_buffer(). So
overlapped calls of a weight and those that fall back all add (`accumulates`), or all return.

With `gradient_accumulation_fusion` Megatron itself adds there by the extension `fused_weight_gradient_mlp_cuda`. Apex compiles
it, no wheel brings it, and without it Megatron refuses to build linears with that setting. A module of that name that calls
torch serves the linears of Megatron, and overlapped ones where a call falls back.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from overlap_train.ops.wgrad import accumulate, is_accumulated, is_watched, unmark

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
    if getattr(weight, "__fsdp_param__", False) or _is_used_twice(linear, weight):
        return False
    if linear.gradient_accumulation_fusion:
        return True
    return main_grad.dtype == torch.float32 and hasattr(weight, "grad_added_to_main_grad")


def _is_used_twice(linear: Any, weight: torch.Tensor) -> bool:
    """Whether an embedding of the same pipeline stage shares this weight, and DDP would miss the embedding's gradient: on the
    last stage of a model with multi-token prediction and tied embeddings. With one stage Megatron sets zero_out_wgrad."""
    tied = getattr(weight, "shared_embedding", False) and bool(getattr(linear.config, "mtp_num_layers", None))
    return tied and not getattr(weight, "zero_out_wgrad", False)


def mark_shared_weights(chunks: Iterable[torch.nn.Module], linears: Iterable[Any]) -> None:
    """Let DDP add both gradients of a linear's weight that another module of the model has, too.

    The other module returns its gradient, which DDP would drop. Megatron marks its own tied embeddings so (zero_out_wgrad), but
    knows nothing of weights that a user ties, as in `model.output_layer.weight = model.embedding.word_embeddings.weight`.
    """
    modules = (module for chunk in chunks for module in chunk.modules())
    owners = Counter(id(parameter) for module in modules for parameter in module.parameters(recurse=False))
    for linear in linears:
        if linear.weight is not None and owners[id(linear.weight)] > 1:
            linear.weight.zero_out_wgrad = True


def through_main_grad(linear: Any, weight: torch.Tensor) -> torch.Tensor:
    """The weight for a call that falls back: itself, or a view whose gradient is added into weight.main_grad, as Megatron's own
    backward does with gradient accumulation fusion."""
    fused = linear.gradient_accumulation_fusion
    if fused or not torch.is_grad_enabled() or not weight.requires_grad:
        return weight
    return _IntoMainGrad.apply(weight) if accumulates(linear, weight, linear.overlap.config) else weight


def is_fused(linear: Any, weight: torch.Tensor) -> bool:
    """Whether a call that falls back may add into main_grad by Megatron's gradient accumulation fusion: where overlapped calls
    add there, too. No call of FSDP's weights overlaps."""
    if not linear.gradient_accumulation_fusion or getattr(weight, "__fsdp_param__", False):
        return linear.gradient_accumulation_fusion
    return accumulates(linear, weight, linear.overlap.config) and not is_watched(weight)


def fused_alike(linear: Any, weight: torch.Tensor, call: Mapping[str, Any]) -> dict[str, Any]:
    """`call`, keyword arguments of Megatron's product in a call that falls back, with the fusion only where `is_fused`, or where
    the gradient is deferred: Megatron does that with the fusion only."""
    if call.get("grad_output_buffer") is not None:
        return dict(call)
    return {**call, "gradient_accumulation_fusion": is_fused(linear, weight)}


class _IntoMainGrad(torch.autograd.Function):
    """Identity; backward adds the gradient into main_grad and returns what DDP's hook expects in its place."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight  # not saved: hooks on saved tensors give back another object, without main_grad
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        weight = ctx.weight
        if is_watched(weight) or not is_accumulated(ctx, 0):
            unmark(weight, ctx, 0)
            return grad
        weight.main_grad.add_(grad)
        weight.grad_added_to_main_grad = True
        # With tied weights DDP adds weight.grad in spite of the mark, for the embedding's share in it.
        return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


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
