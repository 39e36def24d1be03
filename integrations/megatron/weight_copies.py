"""Weights of overlapped linears in fp8: when their copies are made anew (Fp8Copies), once a step, as TransformerEngine does; and
weights that TransformerEngine keeps in fp8 itself (--fp8-param-gather).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from overlap_train import Fp8Copies
from overlap_train.integrations.megatron.conditions import attribute, is_in_fp8
from overlap_train.ops.wgrad import note_added


def renew_copies(linear: Any, weight: torch.Tensor, in_fp8: bool = False) -> None:
    """Before every call: clear the copies of a weight that may have changed. Calls that fall back move the flag and the mark by
    which that is known, too. in_fp8: the call keeps copies."""
    copies = attribute(weight, "fp8_copies", None)
    if copies is None:
        if in_fp8:
            weight.fp8_copies = Fp8Copies()  # type: ignore[attr-defined]
    elif not is_of_this_step(linear, weight):
        copies.clear()


def renew_stack(linear: Any, first: Any) -> None:
    """The same of experts' weights, of which grouped products keep one tensor at the first one (ops/grouped.py)."""
    if not is_of_this_step(linear, first):
        first.stacked = None


def is_of_this_step(linear: Any, weight: torch.Tensor) -> bool:
    """Whether the weight is that of an earlier call of this step. Megatron tells TransformerEngine's modules where a step in fp8
    begins; elsewhere DDP takes its mark away there, which only a backward pass sets again."""
    if not linear.training:  # evaluation begins no step, and the optimizer's may have come before
        return False
    if getattr(linear.config, "fp8", None) and hasattr(linear, "is_first_microbatch"):
        return not (linear.is_first_microbatch or linear.disable_parameter_transpose_cache)
    if getattr(linear.config, "cuda_graph_impl", "none") == "transformer_engine":  # under which DDP leaves its marks
        return False
    trains = torch.is_grad_enabled() and weight.requires_grad
    return trains and bool(attribute(weight, "grad_added_to_main_grad", False))


def plain(weight: torch.Tensor) -> torch.Tensor:
    """The weight as operators take it: itself; of one that is in fp8 its numbers, e4m3 [N, K], with what operators look for."""
    if not is_in_fp8(weight):
        return weight
    w8: Any = _Numbers.apply(weight)
    copies, w8.main_grad = weight.fp8_copies, weight.main_grad  # type: ignore[attr-defined]
    copies.inverse, w8.fp8_copies = weight._scale_inv, copies  # type: ignore[attr-defined]
    if (scales := attribute(weight, "fp8_scales", None)) is not None:
        w8.fp8_scales = scales
    w8.wgrad_store = getattr(weight, "wgrad_store", None)
    return w8


class _Numbers(torch.autograd.Function):
    """The numbers of a weight in fp8, whose gradient goes into main_grad."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> torch.Tensor:
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return weight._data.view(torch.float8_e4m3fn)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None) -> None:
        weight = ctx.weight
        note_added(weight, ctx, 0, partial(weight.main_grad.new_empty, weight.shape, dtype=weight.dtype))
