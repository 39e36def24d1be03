"""When a call of a parallel linear cannot overlap, and why.

One function answers for both kinds of linear. It is asked on every call, because Megatron-Core changes the attributes
that decide at run time: inference toggles `output_layer.sequence_parallel`, shared experts set `explicit_expert_comm`
after construction, weights are frozen and unfrozen. Each answer sends the call to Megatron's own code. What is asked
about is the same on all ranks of the group, so that they take the same path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from overlap_train.graph import is_graphed

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    ParallelLinear = ColumnParallelLinear | RowParallelLinear

NOTHING: Mapping[str, Any] = {}


def fallback_reason(
    linear: ParallelLinear, x: torch.Tensor, weight: torch.Tensor, call: Mapping[str, Any] = NOTHING
) -> str | None:
    """Why this call takes Megatron's own path; None where it overlaps.

    x is the input [s/W, b, K] of a column-parallel or [s, b, K/W] of a row-parallel linear, `weight` the one this
    call uses (the embedding's, where weights are tied), `call` the keyword arguments of
    ColumnParallelLinear._forward_impl.
    """
    return standing_reason(linear, weight) or _call_reason(linear, call) or _input_reason(linear, x, weight)


def standing_reason(linear: ParallelLinear, weight: torch.Tensor | None) -> str | None:
    """The part of the answer that needs no input; `weight` None where it is only known at the call."""
    return _placement_reason(linear) or _feature_reason(linear) or (None if weight is None else _weight_reason(weight))


def _placement_reason(linear: ParallelLinear) -> str | None:
    if linear.is_expert or linear.explicit_expert_comm:
        return "expert: the token dispatcher communicates, not the linear"
    if linear.tp_group.size() == 1:
        return "tensor-parallel size 1: nothing to communicate"
    if not linear.sequence_parallel:
        return "no sequence parallelism: the linear all-reduces"
    if getattr(linear, "disable_grad_reduce", False):
        return "disable_grad_reduce: the caller reduces the input's gradient"
    if not getattr(linear, "input_is_parallel", True):
        return "the input is not split over the ranks"
    return None


def _feature_reason(linear: ParallelLinear) -> str | None:
    config = linear.config
    if getattr(linear, "gtp_remat_size", 1) > 1:
        return "generalized tensor parallelism shards the weight again"
    if getattr(config, "transformer_impl", None) == "inference_optimized":
        return "transformer_impl=inference_optimized"
    if getattr(config, "fp8", None) or getattr(config, "fp4", None):
        return "fp8 or fp4: only TransformerEngine's linears compute in it"
    if getattr(config, "cpu_offloading", False) or getattr(config, "fine_grained_activation_offloading", False):
        return "activations are offloaded to the CPU"
    return None


def _weight_reason(weight: torch.Tensor) -> str | None:
    if not weight.requires_grad:
        return "frozen weight"
    if getattr(weight, "__fsdp_param__", False):
        return "Megatron-FSDP owns the weight's gradient"
    return None


def _call_reason(linear: ParallelLinear, call: Mapping[str, Any]) -> str | None:
    if not linear.training:
        return "evaluation mode"
    if call.get("grad_output_buffer") is not None or call.get("wgrad_deferral_limit") is not None:
        return "the weight gradient is deferred (defer_embedding_wgrad_compute)"
    if call.get("output_dtype") is not None:
        return f"output_dtype={call['output_dtype']}"
    return None


def _input_reason(linear: ParallelLinear, x: torch.Tensor, weight: torch.Tensor) -> str | None:
    if x.dtype != weight.dtype:
        return f"input is {x.dtype}, weight {weight.dtype}"
    device = x.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != x.dtype:
        return f"autocast to {torch.get_autocast_dtype(device)} of {x.dtype} tensors"
    if linear.overlap.config.on_unsupported == "fallback" and x.is_cuda and _is_captured(linear):
        return "CUDA graph capture outside overlap_train.graphed"
    is_row = getattr(linear, "input_is_parallel", False)
    if is_row and x.size(0) % linear.tp_group.size():
        return f"sequence of {x.size(0)} is not divisible by the {linear.tp_group.size()} ranks"
    return None


def _is_captured(linear: ParallelLinear) -> bool:
    """Into a graph whose replays the operators could not stand; with on_unsupported='error' they raise."""
    return torch.cuda.is_current_stream_capturing() and not is_graphed(linear.tp_group)
