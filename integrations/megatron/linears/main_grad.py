"""Which weight gradients go straight into `weight.main_grad`, and how calls that fall back join in.

Megatron's DDP gives every parameter an fp32 buffer `main_grad` and a mark `grad_added_to_main_grad`. A backward that has added
its gradient there sets the mark, and DDP's hook then ignores `weight.grad` until the next zero_grad_buffer(). If an overlapped
call has set the mark, a later call of the same step that falls back and returns its gradient the ordinary way would lose it.
Calls that fall back therefore add into main_grad as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from overlap_train import OverlapConfig


def accumulates(linear: Any, weight: torch.Tensor, config: OverlapConfig) -> bool:
    """Whether overlapped calls of `linear` add their weight gradient into weight.main_grad.

    True where config.main_grad asks for it, main_grad is fp32, and somebody looks for the gradient there: DDP (it marks the
    parameter) or gradient accumulation fusion. A 16-bit main_grad is left to DDP's hook, and FSDP's to FSDP.
    """
    main_grad = getattr(weight, "main_grad", None)
    if config.main_grad != "accumulate" or main_grad is None or main_grad.dtype != torch.float32:
        return False
    if getattr(weight, "__fsdp_param__", False) or _is_used_twice(linear, weight):
        return False
    return hasattr(weight, "grad_added_to_main_grad") or linear.gradient_accumulation_fusion


def _is_used_twice(linear: Any, weight: torch.Tensor) -> bool:
    """Whether an embedding of the same pipeline stage shares this weight, and DDP would miss the embedding's gradient.

    That is so on the last stage of a model with multi-token prediction and tied embeddings. With one stage Megatron sets
    zero_out_wgrad, which tells DDP to add both gradients.
    """
    tied = getattr(weight, "shared_embedding", False) and bool(getattr(linear.config, "mtp_num_layers", None))
    return tied and not getattr(weight, "zero_out_wgrad", False)


def through_main_grad(linear: Any, weight: torch.Tensor) -> torch.Tensor:
    """The weight for a call that falls back: itself, or a view whose gradient is added into weight.main_grad.

    With gradient accumulation fusion Megatron's own backward adds into main_grad already.
    """
    if linear.gradient_accumulation_fusion or not (torch.is_grad_enabled() and weight.requires_grad):
        return weight
    if not accumulates(linear, weight, linear.overlap.config):
        return weight
    return _IntoMainGrad.apply(weight)


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
        weight.main_grad.add_(grad)
        weight.grad_added_to_main_grad = True
        # With tied weights DDP adds weight.grad in spite of the mark, for the embedding's share in it.
        return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
