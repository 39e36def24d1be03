"""When overlapped linears in fp8 make the copies of a weight anew (Fp8Copies): once a step, as TransformerEngine does."""

from __future__ import annotations

from typing import Any

import torch

from overlap_train import Fp8Copies
from overlap_train.integrations.megatron.conditions import attribute


def renew_copies(linear: Any, weight: torch.Tensor, in_fp8: bool = False) -> None:
    """Before every call: clear the copies of a weight that may have changed. Calls that fall back move the flag and the mark by
    which that is known, too. in_fp8: the call keeps copies."""
    copies = attribute(weight, "fp8_copies", None)
    if copies is None:
        if in_fp8:
            weight.fp8_copies = Fp8Copies()  # type: ignore[attr-defined]
    elif not is_of_this_step(linear, weight):
        copies.clear()


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
