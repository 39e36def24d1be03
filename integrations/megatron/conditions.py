"""What keeps a parallel linear from overlapping: settings of the model, of the linear, or of a single call.

`bad_combination` looks at a model's settings before its linears are changed. `fallback_reason` is asked on every call, because
Megatron-Core changes built linears: inference toggles `output_layer.sequence_parallel`, shared experts set
`explicit_expert_comm`. Every rank of the group finds the same reason. Frozen weights and evaluation are none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.extensions import transformer_engine as megatron_te

from overlap_train.group.registry import is_graphed
from overlap_train.integrations.megatron.main_grad import accumulates
from overlap_train.ops.spec import DTYPES, misfit_in_fp8, no_fp8_on, other_autocast
from overlap_train.ops.wgrad import is_watched

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    ParallelLinear = ColumnParallelLinear | RowParallelLinear

ULYSSES = "a2a"
MEGATRONS_DEFAULT = "p2p"  # TransformerEngine's, where cp_comm_type is None


def comm_type(config: TransformerConfig, layer_number: int) -> str:
    """cp_comm_type of a layer, counted from 1."""
    types = config.cp_comm_type
    if isinstance(types, list):
        return types[min(layer_number, len(types)) - 1]
    return types or MEGATRONS_DEFAULT


def has_ulysses(config: TransformerConfig) -> bool:
    """Whether any layer is Ulysses'. A linear on its own may have a ModelParallelConfig, which knows no layers."""
    types = getattr(config, "cp_comm_type", None)
    types = types if isinstance(types, list) else [types]
    return getattr(config, "context_parallel_size", 1) > 1 and ULYSSES in types


NOTHING: Mapping[str, Any] = {}
_FALL_BACK = "or run Megatron's own linears with on_unsupported='fallback' (--overlap-train-on-unsupported fallback)"
_ONLY_TE = "only TransformerEngine's linears compute in it"
# Megatron's (format, recipe) -> OverlapConfig.fp8
OUR_FP8 = {
    ("hybrid", "tensorwise"): "tensorwise", ("e4m3", "tensorwise"): "tensorwise_e4m3", ("hybrid", "delayed"): "tensorwise",
    ("e4m3", "delayed"): "tensorwise_e4m3", ("e4m3", "blockwise"): "blockwise",
}  # fmt: skip
_OUR_FP8_BY_TE = (
    "--fp8-format, or take --fp8-recipe delayed or tensorwise, or blockwise with --fp8-format e4m3: ours have these"
)
_OUR_FP8_ALONE = "--fp8-format, and without TransformerEngine take --overlap-train-fp8 tensorwise or blockwise"
_FP32_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"  # TransformerEngine's variable
_ON_THE_GPU = "what an overlapped linear saves for backward stays on the GPU"
_MUST_BE_OFF = {  # setting of a model -> why, Megatron's flag
    "tp_comm_overlap": ("TransformerEngine's overlap and this one exclude each other", "--tp-comm-overlap"),
    "use_transformer_engine_op_fuser": (
        "with it TransformerEngine computes an MLP without calling its linears",
        "--use-transformer-engine-op-fuser",
    ),
    "fp8": (_ONLY_TE, _OUR_FP8_BY_TE if megatron_te.HAVE_TE else _OUR_FP8_ALONE),
    "fp4": (_ONLY_TE, "--fp4-format"),
    "cpu_offloading": (_ON_THE_GPU, "--cpu-offloading-num-layers"),
    "fine_grained_activation_offloading": (_ON_THE_GPU, "--fine-grained-activation-offloading"),
}


@dataclass(frozen=True)
class Problem:
    """What rules out overlap. what: the setting, its value and the rule. instead: what to set or call."""

    what: str
    instead: str
    can_fall_back: bool = True

    def __str__(self) -> str:
        return f"{self.what}; {self.instead}"

    @property
    def error(self) -> ValueError:
        return ValueError(f"{self}, {_FALL_BACK}" if self.can_fall_back else str(self))


def bad_combination(config: TransformerConfig, has_experts: bool = False) -> Problem | None:
    """The setting of a model under which no linear can overlap. has_experts: others are to overlap, which need no tensor
    parallelism."""
    alone = config.tensor_model_parallel_size == 1 and not has_experts
    if alone and not has_ulysses(config):
        wanted = "2 or more, or use Ulysses (context_parallel_size=2, cp_comm_type='a2a')"
        if getattr(config, "num_moe_experts", None) and config.expert_model_parallel_size > 1:
            wanted += ", or hide the experts' exchange (experts=True, --overlap-train-experts)"
        return _setting(config, "tensor_model_parallel_size", "with one rank there is nothing to overlap", wanted)
    if getattr(config, "transformer_impl", None) == "inference_optimized":
        return _setting(config, "transformer_impl", "overlap is for training", "'local'")
    for field, (rule, flag) in _MUST_BE_OFF.items():
        if getattr(config, field, None) and not (field == "fp8" and our_fp8(config)):
            off = "None" if field in ("fp8", "fp4") else "False"
            return _setting(config, field, rule, f"{off} (leave out {flag})")
    if our_fp8(config) and (why := _why_not_as_te(config)) is not None:
        return Problem(f"fp8_recipe={config.fp8_recipe!r} in the model's config: {why[0]}", why[1])
    return None


def our_fp8(config: TransformerConfig) -> str | None:
    """The OverlapConfig.fp8 by which our operators multiply as TransformerEngine's fp8 of a model does. None: none does, or
    it is not in fp8. TE must be there: it says which layers are in fp8, and with `delayed` by which scales."""
    asked = getattr(config, "fp8", None), getattr(config, "fp8_recipe", None)
    return OUR_FP8.get(asked) if megatron_te.HAVE_TE else None  # type: ignore[arg-type]


def _why_not_as_te(config: TransformerConfig) -> tuple[str, str] | None:
    """(why ours do not multiply as TransformerEngine in a recipe that they have, what to set instead), or None: they do."""
    if config.fp8_recipe == "delayed" and not getattr(config, "fp8_wgrad", True):
        return "fp8_wgrad=False, and weight gradients of ours are in fp8", "leave out --no-fp8-wgrad"
    if config.fp8_recipe != "blockwise":
        return None
    if torch.cuda.is_available() and (why := no_fp8_on(torch.device("cuda"), "blockwise")) is not None:
        return why, "take another recipe"
    if os.environ.get(_FP32_SCALES, "0") == "1":
        return f"{_FP32_SCALES}=1, and scales of ours are powers of two", f"unset {_FP32_SCALES}"
    if getattr(config, "fp8_param", False):
        kept = "weights that are kept in fp8 (fp8_param=True) have one scale a tensor in ours"
        return kept, "leave out --fp8-param-gather"
    return None


def broken_rule(config: Any, rules: Iterable[tuple[str, Any, str]]) -> str | None:
    """The first of `rules` (setting, the only value that is possible, why) that a config breaks, in words; None: it obeys all."""
    for field, wanted, rule in rules:
        value = getattr(config, field, wanted)
        if value != wanted:
            return f"{field}={value!r}: {rule}; set it to {wanted!r}"
    return None


def _setting(config: TransformerConfig, field: str, rule: str, wanted: str) -> Problem:
    return Problem(f"{field}={getattr(config, field)!r} in the model's config: {rule}", f"set it to {wanted}")


def fallback_reason(
    linear: ParallelLinear, x: torch.Tensor, weight: torch.Tensor, call: Mapping[str, Any] = NOTHING
) -> str | None:
    """Why this call runs Megatron's own code; None where it overlaps.

    x: [s/W, b, K] of a column-parallel linear ([s, b, K] without sequence parallelism), [s, b, K/W] of a row-parallel one.
    weight: of this call, which is the embedding's where weights are tied. call: the keyword arguments of
    ColumnParallelLinear._forward_impl.
    """
    reason = standing_reason(linear, weight) or _call_reason(call)
    reason = reason or input_reason(linear, x, weight, linear.tp_group)
    is_row = attribute(linear, "input_is_parallel", False)
    if reason is None and is_row and linear.sequence_parallel and x.shape[0] % linear.tp_group.size():
        return f"sequence of {x.size(0)} is not divisible by the {linear.tp_group.size()} ranks"
    if reason is None and asks_for_fp8(linear):
        reason = _fp8_reason(linear, weight, x.shape[:-1].numel() * (1 if is_row else linear.tp_group.size()))
    return reason


def is_in_fp8(weight: Any) -> bool:
    """Whether TransformerEngine keeps a weight in fp8, with one scale (its Float8Tensor)."""
    return hasattr(weight, "_data") and hasattr(weight, "_scale_inv")


def _fp8_reason(linear: ParallelLinear, weight: torch.Tensor, rows: int) -> str | None:
    """Why a call that is to multiply in fp8 runs Megatron's own code; None where it does not. rows: of all ranks."""
    if not_in_fp8(linear) is not None:
        return "a weight in fp8 of a linear that is not in fp8" if is_in_fp8(weight) else None
    tes, config = getattr(linear.config, "fp8", None), linear.overlap.config
    if tes or config.on_unsupported != "error":
        fp8 = (our_fp8(linear.config) if tes else None) or config.fp8
        misfit = misfit_in_fp8(fp8, rows, tuple(weight.shape), linear.tp_group.size())
        if misfit is not None:
            return f"fp8 with {misfit}"
    if is_in_fp8(weight) and (is_watched(weight) or not accumulates(linear, weight, linear.overlap.config)):
        return "a weight in fp8 whose gradient does not go into main_grad"  # autograd would give it the dtype of the numbers
    return None


def exchange_reason(linear: ParallelLinear, x: torch.Tensor, group: dist.ProcessGroup | None) -> str | None:
    """Why a linear of a Ulysses attention does not exchange within its product in this call; None where it does. group: the
    context-parallel group of this call, if it has one."""
    if group is None or group.size() == 1:
        return "context-parallel size 1: nothing to communicate"
    reason = standing_reason(linear, linear.weight, exchanges=True) or input_reason(linear, x, linear.weight, group)
    return reason or (input_reason(linear, x, linear.weight, linear.tp_group) if divides_weights(linear) else None)


def divides_weights(linear: ParallelLinear) -> bool:
    """Whether tensor parallelism divides the weight of this linear. Without it a linear may have no group."""
    return linear.tp_group is not None and linear.tp_group.size() > 1


def standing_reason(linear: ParallelLinear, weight: torch.Tensor | None, exchanges: bool = False) -> str | None:
    """The reasons that hold for every input. weight None: it is known at the call only. exchanges: within its product."""
    placement = None if exchanges and not divides_weights(linear) else _placement_reason(linear)
    if placement is None and exchanges and divides_weights(linear) and not linear.sequence_parallel:
        placement = "no sequence parallelism: exchange and tensor parallelism overlap together under it only"
    reason = placement or _feature_reason(linear, exchanges)
    if reason is None and weight is not None and getattr(weight, "__fsdp_param__", False):
        return "Megatron-FSDP owns the weight's gradient"
    return reason


def attribute(holder: Any, name: str, default: Any) -> Any:
    """getattr of what is no parameter, without the search of a module's parameters, buffers and modules (0.7 microseconds)."""
    found = vars(holder).get(name, NOTHING)
    return getattr(type(holder), name, default) if found is NOTHING else found


def asks_for_fp8(linear: ParallelLinear) -> bool:
    """Whether we are to multiply in fp8, by our setting or TransformerEngine's."""
    return linear.overlap.config.fp8 != "off" or bool(getattr(linear.config, "fp8", None))


def not_in_fp8(linear: ParallelLinear) -> str | None:
    """Why an overlapped linear multiplies in its own dtype now, where fp8 is asked for, by us or of TransformerEngine; None: it
    multiplies in fp8. TransformerEngine leaves some layers out, by its context."""
    if linear.overlap.slot == "output":
        return "not in fp8: the output layer"
    if getattr(linear.config, "fp8", None):
        return None if tes_fp8_is_on() else "not in fp8: TransformerEngine leaves this layer out"
    if not linear.sequence_parallel:
        return "not in fp8: no sequence parallelism"
    if attribute(linear, "is_in_an_exchange", False):
        return "not in fp8: it exchanges over context-parallel ranks"
    return None


def tes_fp8_is_on() -> bool:
    """Whether what is called now is in a layer that TransformerEngine has in fp8."""
    return bool(sys.modules["transformer_engine.pytorch.fp8"].FP8GlobalStateManager.is_fp8_enabled())


def _placement_reason(linear: ParallelLinear) -> str | None:
    # TransformerEngine's linears lack the first two; those of experts have no parallel mode.
    is_expert = attribute(linear, "is_expert", False) or attribute(linear, "explicit_expert_comm", False)
    if is_expert or attribute(linear, "parallel_mode", "column") is None:
        return "expert: the token dispatcher communicates (see --overlap-train-experts)"
    if linear.tp_group.size() == 1:
        return "tensor-parallel size 1: nothing to communicate"
    if not linear.sequence_parallel and not attribute(linear, "allreduce_dgrad", True):
        return "sequence_parallel was switched off: Megatron all-reduces the input's gradient itself"
    if attribute(linear, "disable_grad_reduce", False):
        return "disable_grad_reduce: the caller reduces the input's gradient"
    if not attribute(linear, "input_is_parallel", True):
        return "the input is not split over the ranks"
    return None


def _feature_reason(linear: ParallelLinear, exchanges: bool) -> str | None:
    config = linear.config
    # TransformerEngine marks the weight
    holder = linear if attribute(linear, "parallel_mode", NOTHING) is NOTHING else linear.weight
    if (attribute(holder, "gtp_remat_size", None) or 1) > 1:
        return "generalized tensor parallelism shards the weight again"
    if getattr(config, "transformer_impl", None) == "inference_optimized":
        return "transformer_impl=inference_optimized"
    if getattr(config, "fp4", None) or (getattr(config, "fp8", None) and not our_fp8(config)):
        return "fp8 or fp4: only TransformerEngine's linears compute in it"
    if getattr(config, "fp8", None) and holder is not linear and (exchanges or not linear.sequence_parallel):
        return "fp8: ours is for sequence parallelism, without an exchange"
    if exchanges and holder is not linear and getattr(config, "delay_wgrad_compute", False):
        return "delay_wgrad_compute: the weight gradient of a linear that exchanges cannot wait"
    if getattr(config, "cpu_offloading", False) or getattr(config, "fine_grained_activation_offloading", False):
        return "activations are offloaded to the CPU"
    return None


def _call_reason(call: Mapping[str, Any]) -> str | None:
    if call.get("grad_output_buffer") is not None or call.get("wgrad_deferral_limit") is not None:
        return "the weight gradient is deferred (defer_embedding_wgrad_compute)"
    if call.get("output_dtype") is not None:
        return f"output_dtype={call['output_dtype']}"
    return None


def input_reason(linear: Any, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> str | None:
    """Why the operand of a linear, or of a layer of experts, does not go to our operators in this call, or None."""
    if x.dtype != weight.dtype:
        return f"input is {x.dtype}, weight {weight.dtype}"
    autocast = other_autocast(x)
    if autocast is not None:
        return f"autocast to {autocast} of {x.dtype} tensors"
    if linear.overlap.config.on_unsupported == "error":  # the operators raise
        return None
    if x.dtype not in DTYPES:
        return f"{x.dtype} tensors"
    if x.is_cuda and torch.cuda.is_current_stream_capturing() and not is_graphed(group):
        return "CUDA graph capture outside overlap_train.graphed"
    return None
