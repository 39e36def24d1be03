"""Megatron-Core's parallel linears, and TransformerEngine's as Megatron wraps them, with their communication overlapped.

    ColumnParallelLinear              our all-gather + GEMM
    RowParallelLinear                 our GEMM + reduce-scatter
    TELayerNormColumnParallelLinear   TE's norm, then our all-gather + GEMM
    TEColumnParallelLinear            our all-gather + GEMM
    TERowParallelLinear               our GEMM + reduce-scatter

Without sequence parallelism row linears run our GEMM + all-reduce, and column linears in their backward.
Only the class of a built module changes, to a subclass of what it was: parameters, their attributes, checkpoint keys and TE's
extra state stay. A call that cannot overlap (conditions.py) runs Megatron's or TE's own code and is counted with its reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from overlap_train import (
    OverlapConfig,
    all_gather_linear,
    linear_all_reduce,
    linear_dgrad_all_reduce,
    linear_reduce_scatter,
)
from overlap_train.integrations.megatron.conditions import (
    OUR_FP8,
    attribute,
    bad_combination,
    fallback_reason,
    not_in_fp8,
    our_fp8,
    standing_reason,
)
from overlap_train.integrations.megatron.main_grad import accumulates, fused_alike, is_fused
from overlap_train.integrations.megatron.te_norm import (
    NormKernels,
    norm_all_gather_linear,
    norm_kernels,
    normed,
    too_old,
)
from overlap_train.integrations.megatron.te_scales import has_delayed_scales, scales_of, update_after_backward
from overlap_train.integrations.megatron.weight_copies import plain, renew_copies
from overlap_train.ops.plan import Plan
from overlap_train.ops.spec import (
    ALL_GATHER_LINEAR,
    LINEAR_ALL_REDUCE,
    LINEAR_DGRAD_ALL_REDUCE,
    LINEAR_REDUCE_SCATTER,
    OperatorSpec,
)
from overlap_train.select.autotune import Autotune

OWN = (ColumnParallelLinear, RowParallelLinear)
Model = torch.nn.Module | Sequence[torch.nn.Module]

# How Megatron-Core names the linears in its modules -> our name of the linear slot. _LATENT: of multi-latent attention; in_proj,
# out_proj: of layers that take the place of attention (gated delta net, Mamba).
_LATENT = ("q", "q_down", "q_up", "kv_down", "kv_up", "qkv_down")
SLOT_OF_ATTRIBUTE = {
    "linear_qkv": "qkv",
    **{f"linear_{part}_proj": "qkv" for part in _LATENT},
    "in_proj": "qkv",
    "linear_proj": "proj",
    "out_proj": "proj",
    "linear_fc1": "fc1",
    "linear_fc2": "fc2",
    "output_layer": "output",
}
# How LoRA's wrappers call the linear within: Megatron-Bridge's and NeMo's, and PEFT's.
_WRAPPED = ("to_wrap", "base_layer")


@dataclass
class LinearOverlap:
    """The attribute `overlap` of an overlapped linear: settings, name, what its calls did. No part of a checkpoint."""

    config: OverlapConfig
    slot: str  # linear slot, one of overlap_train.config.SLOTS
    name: str  # where it is in the model, for error messages
    overlapped_calls: int = 0
    fallback_calls: Counter[str] = field(default_factory=Counter)  # reason -> calls
    # Of the last overlapped call: its plan (of parts the first one's), and the autotune run in which it took part.
    plan: Plan | None = None
    run: Autotune | None = None
    on_gradient: Callable[[torch.Tensor], None] | None = None  # enable() sets it until the table is printed
    # enable() sets it until a linear of the model is called (ahead.py)
    on_first_plan: Callable[[str, Plan], None] | None = None
    norm: NormKernels | None = None  # of a TELayerNormColumnParallelLinear
    # Of a linear that exchanges within its product: the groups of overlapped calls, the last one's last.
    groups: dict[dist.ProcessGroup, None] = field(default_factory=dict)
    # Over TP, of the last call that could exchange: why its exchange was a collective; or how many parts hid each other's.
    apart: str | None = None
    parts: int | None = None
    # A step has begun in an overlapped call, and TransformerEngine's own copies of the weight are of an earlier one.
    te_is_behind: bool = False

    def __post_init__(self) -> None:
        # By whether the weight gradient goes into main_grad, and the product's fp8.
        self._configs = {
            (adds, fp8): replace(self.config, fp8=fp8, main_grad=self.config.main_grad if adds else "off")
            for adds in (True, False)
            for fp8 in ("off", *dict.fromkeys(OUR_FP8.values()))
        }

    def count(self, reason: str | None, group: dist.ProcessGroup | None = None) -> None:
        """Count one forward call; `reason` None: it overlaps, and exchanges over `group`."""
        if reason is not None:
            self.fallback_calls[reason] += 1
            return
        self.overlapped_calls += 1
        if group is not None:
            self.groups.pop(group, None)
            self.groups[group] = None

    def note_plan(self, plan: Plan, run: Autotune | None) -> None:
        self.plan, self.run = plan, run
        if self.on_first_plan is not None:
            self.on_first_plan(self.name, plan)

    def fp8_of(self, linear: Any) -> str:
        """In which way a call multiplies in fp8, "off": not at all."""
        fp8 = our_fp8(linear.config) or self.config.fp8
        return "off" if fp8 == "off" or not_in_fp8(linear) is not None else fp8

    def config_of(self, linear: Any, weight: torch.Tensor) -> OverlapConfig:
        """Of one call: the weight gradient goes where Megatron's or TE's own call would put it; TE's goes into main_grad under
        gradient accumulation fusion only. Tells the weight of its fp8 copies of this step, and of TE's store of delayed
        gradients."""
        adds = attribute(linear, "fuse_wgrad_accumulation", True) and accumulates(linear, weight, self.config)
        fp8 = self.fp8_of(linear)
        renew_copies(linear, weight, fp8 != "off")
        if (store := attribute(linear, "wgrad_store", None)) is not None:  # TE's, for delay_wgrad_compute
            weight.wgrad_store = store  # type: ignore[attr-defined]
        return self._configs[adds, fp8]

    def watched(self, y: torch.Tensor) -> torch.Tensor:
        """Return y, and let `on_gradient` be called when the gradient of y arrives."""
        if self.on_gradient is not None and y.requires_grad:
            y.register_hook(self.on_gradient)
        return y


# By whether it is a row linear, and under sequence parallelism.
OPERATORS: dict[tuple[bool, bool], tuple[OperatorSpec, Callable[..., torch.Tensor]]] = {
    (False, True): (ALL_GATHER_LINEAR, all_gather_linear),
    (True, True): (LINEAR_REDUCE_SCATTER, linear_reduce_scatter),
    (False, False): (LINEAR_DGRAD_ALL_REDUCE, linear_dgrad_all_reduce),
    (True, False): (LINEAR_ALL_REDUCE, linear_all_reduce),
}


def product(
    linear: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, settings: dict[str, Any]
) -> torch.Tensor:
    """x [s/W, b, K] -> y [s, b, N/W], of a row linear x [s, b, K/W] -> y [s/W, b, N]: all linears overlap here. Without sequence
    parallelism every rank has all rows of x, or y. settings: settings_of()."""
    operator = OPERATORS[attribute(linear, "input_is_parallel", False), linear.sequence_parallel][1]
    return linear.overlap.watched(operator(x, weight, bias, **settings))


def settings_of(linear: Any, weight: torch.Tensor) -> dict[str, Any]:
    """What operators are told in a call beside their operands."""
    overlap = linear.overlap
    config = overlap.config_of(linear, weight)
    return dict(group=linear.tp_group, config=config, name=overlap.name, on_plan=overlap.note_plan)


def biases(linear: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(bias to add, bias to return to a caller that adds it itself). TE's linears without a bias have an empty one."""
    bias = linear.bias if attribute(linear, "use_bias", True) else None
    is_returned = attribute(linear, "te_return_bias", None)
    is_returned = linear.skip_bias_add if is_returned is None else is_returned
    return (None, bias) if is_returned else (bias, None)


class MegatronFallback:
    """Megatron's own product, for calls that fall back. Mixed in before one of Megatron's classes."""

    overlap: Any

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        renew_copies(self, weight)
        y = super()._forward_impl(input, weight, *args, **fused_alike(self, weight, kwargs))  # type: ignore[misc]
        return self.overlap.watched(y)


class OverlappedColumnParallelLinear(MegatronFallback, ColumnParallelLinear):
    """y = all_gather(x) Wᵀ + b: x [s/W, b, K], weight [N/W, K], y [s, b, N/W]; the product hides the gather. Without sequence
    parallelism x is [s, b, K], and the two products of backward hide the all-reduce of its gradient.

    enable() makes it of a ColumnParallelLinear. Bias, tied weights and gathering of the output stay Megatron's.
    """

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        reason = fallback_reason(self, input, weight, kwargs)
        self.overlap.count(reason)
        if reason is None:
            return product(self, input, weight, kwargs["bias"], settings_of(self, weight))
        return super()._forward_impl(input, weight, *args, **kwargs)


class OverlappedRowParallelLinear(MegatronFallback, RowParallelLinear):
    """y = reduce_scatter(x Wᵀ) + b: x [s, b, K/W], weight [N, K/W], y [s/W, b, N]; the product hides the scatter. Without
    sequence parallelism y is all_reduce(x Wᵀ) + b, [s, b, N].

    enable() makes it of a RowParallelLinear.
    """

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(y, None), or (y without b, b) with skip_bias_add."""
        reason = fallback_reason(self, input_, self.weight)
        self.overlap.count(reason)
        if reason is not None:
            return super().forward(input_)
        added, returned = biases(self)
        return product(self, input_, self.weight, added, settings_of(self, self.weight)), returned


class TEFallback:
    """TE's own forward, for calls that fall back. Mixed in before one of Megatron's TE classes."""

    @property
    def gradient_accumulation_fusion(self: Any) -> bool:
        """The name that Megatron's own linears have for it."""
        return self.fuse_wgrad_accumulation

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """TE's forward notes for its backward whether to fuse (main_grad.py: is_fused). Where that is delayed, backward_dw() asks
        the module itself."""
        renew_copies(self, self.weight)
        before = self.fuse_wgrad_accumulation, self.disable_parameter_transpose_cache
        store = attribute(self, "wgrad_store", None)
        if store is None or not store.delay_wgrad_compute():
            self.fuse_wgrad_accumulation = is_fused(self, self.weight)
        self.overlap.te_is_behind &= not self.is_first_microbatch
        # The weight is made anew then, and not kept. At a step's first micro-batch TE's backward would write over main_grad.
        self.disable_parameter_transpose_cache |= self.overlap.te_is_behind
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.fuse_wgrad_accumulation, self.disable_parameter_transpose_cache = before


class TERowFallback(TEFallback):
    input_is_parallel = True  # as Megatron's own row linears have it


class _OverlappedTE:
    """x [s/W, b, K] -> y [s, b, N/W], of a row linear x [s, b, K/W] -> y [s/W, b, N]; with a norm, of the normalised x."""

    def forward(self: Any, x: torch.Tensor) -> tuple[Any, ...]:
        """(y, None), or (y without b, b) where the caller adds the bias itself. With return_layernorm_output, as LoRA sets it,
        ((y, normalised x), None) or (y without b, b, normalised x)."""
        reason = te_feature(self) or fallback_reason(self, x, self.weight)
        self.overlap.count(reason)
        if reason is not None:
            y, *others = super().forward(x)  # type: ignore[misc]
            watched = self.overlap.watched
            return ((watched(y[0]), *y[1:]) if isinstance(y, tuple) else watched(y), *others)
        added, returned = biases(self)
        wants_h = self.overlap.norm is not None and attribute(self, "return_layernorm_output", False)
        settings = settings_of(self, self.weight)
        in_fp8 = settings["config"].fp8 != "off"
        if self.overlap.norm is not None and self.sequence_parallel and not in_fp8:
            y, x = norm_all_gather_linear(self, x, self.weight, added, wants_h, **settings)
            y = self.overlap.watched(y)
        else:
            is_delayed = in_fp8 and has_delayed_scales(self.config)
            x = normed(self, x)
            with scales_of(self, x) if is_delayed else nullcontext():
                y = product(self, x, plain(self.weight) if in_fp8 else self.weight, added, settings)
            if is_delayed:
                update_after_backward(y)
        if self.is_first_microbatch:  # as TE's forward does
            self.is_first_microbatch, self.overlap.te_is_behind = False, True
        if not wants_h:
            return y, returned
        if attribute(self, "return_layernorm_output_gathered", False) and self.sequence_parallel:
            x = gather_from_sequence_parallel_region(x, group=self.tp_group)
        return (y, returned, x) if self.te_return_bias else ((y, x), None)


@cache
def fallbacks() -> dict[type, type]:
    """Linear class -> the mixin for its calls that fall back; only of Megatron's own where TransformerEngine is not installed."""
    mixins: dict[type, type] = {ColumnParallelLinear: MegatronFallback, RowParallelLinear: MegatronFallback}
    if megatron_te.HAVE_TE:
        mixins[megatron_te.TELayerNormColumnParallelLinear] = TEFallback
        mixins[megatron_te.TEColumnParallelLinear] = TEFallback
        mixins[megatron_te.TERowParallelLinear] = TERowFallback
    return mixins


@cache
def overlapped_forms() -> dict[type, type]:
    """Linear class -> its overlapped subclass."""
    te = {kind: derived(kind, _OverlappedTE, mixin) for kind, mixin in fallbacks().items() if kind not in OWN}
    return {ColumnParallelLinear: OverlappedColumnParallelLinear, RowParallelLinear: OverlappedRowParallelLinear, **te}


def derived(kind: type, *mixins: type) -> type:
    """A subclass of the same name: Megatron-FSDP and PEFT tools go by names."""
    return type(kind.__name__, (*mixins, kind), {"__module__": __name__, "__doc__": mixins[0].__doc__})


def turn_linear(linear: Any, form: type, config: OverlapConfig, slot: str, name: str) -> None:
    linear.__class__, linear.overlap = form, LinearOverlap(config, slot, name, norm=norm_kernels(linear))
    if isinstance(linear, OWN):
        # Megatron-FSDP recognises parallel linears by the name of their class and, failing that, by these two.
        linear.tensor_model_parallel = True
        linear.partition_dim = 0 if isinstance(linear, ColumnParallelLinear) else 1


def why_not(linear: Any, exchanges: bool = False) -> str | None:
    """Why no call of a linear that is not overlapped can be, or can exchange within its product; None: some can."""
    if megatron_te.HAVE_TE and type(linear) is megatron_te.TELinear:
        return "the same weight on every rank: nothing to communicate"
    if type(linear) not in overlapped_forms():
        return f"{type(linear).__name__} has no {'form that exchanges' if exchanges else 'overlapped form'}"
    problem = bad_combination(linear.config)
    return standing_reason(linear, None, exchanges) or te_feature(linear) or (None if problem is None else problem.what)


def te_feature(linear: Any) -> str | None:
    """What TE would do in its linears that ours do not; None of Megatron's own linears."""
    if isinstance(linear, OWN):
        return None
    if attribute(linear, "te_quant_params", None) is not None:
        return "quantized by TransformerEngine (te_quant_params)"
    if too_old() is not None and (hasattr(linear, "layer_norm_weight") or has_delayed_scales(linear.config)):
        return too_old()
    if getattr(linear.config, "delay_wgrad_compute", False) and linear.use_bias and not linear.bias.requires_grad:
        return "delay_wgrad_compute: TransformerEngine then wants the gradient of a frozen bias"
    return None


def fused_mlp(model: torch.nn.Module) -> str | None:
    """The class of an MLP that TransformerEngine's op fuser computes without calling its linears; None: there is none. Asked of
    the modules: Megatron-Core 0.16 notes `use_te_op_fuser` of a spec nowhere in the model's settings."""
    fused = getattr(megatron_te, "TEFusedMLP", None) or ()
    return next((type(module).__name__ for module in model.modules() if isinstance(module, fused)), None)


def chunks_of(model: Model) -> list[torch.nn.Module]:
    return [model] if isinstance(model, torch.nn.Module) else list(model)


def named_linears(model: Model) -> Iterator[tuple[str, Any]]:
    """(name, module) of the modules in one of our linear slots and of all other parallel linears of Megatron's own classes.

    Names are those of the bare model, without the wrappers' leading "module."; of several chunks with "chunk0." before them. Of
    LoRA's wrappers it is the linear within; their adapters are left out. A linear alone has the name of its class.
    """
    chunks, own = chunks_of(model), (*OWN, OverlappedColumnParallelLinear, OverlappedRowParallelLinear)
    for index, chunk in enumerate(chunks):
        prefix = f"chunk{index}." if len(chunks) > 1 else ""
        if is_candidate(chunk) and hasattr(chunk, "weight"):  # not a layer of experts alone
            yield prefix + type(chunk).__name__, chunk
            continue
        wrappers: tuple[str, ...] = ()
        for name, module in chunk.named_modules():
            if unwrapped(module) is not module:
                wrappers += (f"{name}.",)
            elif name.startswith(wrappers) and name.rpartition(".")[2] not in _WRAPPED:
                continue
            is_linear = hasattr(module, "weight") and hasattr(module, "config")  # no linear of torch of that name
            if (is_linear and slot_of(name) is not None) or type(module) in own:
                yield prefix + re.sub(r"^(module\.)+", "", name), module


def unwrapped(module: Any) -> Any:
    """The linear within LoRA's wrappers, or the module itself."""
    within = next(
        (inner for name in _WRAPPED if isinstance(inner := getattr(module, name, None), torch.nn.Module)), None
    )
    return module if within is None else unwrapped(within)


def overlapped_linears(model: Model) -> list[Any]:
    return [linear for _, linear in named_linears(model) if is_overlapped(linear)]


def slot_of(name: str) -> str | None:
    """ "decoder.layers.0.mlp.linear_fc1" -> "fc1", also of what LoRA wraps; None for a name that is no linear slot."""
    return SLOT_OF_ATTRIBUTE.get(re.sub(rf"(\.({'|'.join(_WRAPPED)}))+$", "", name).rpartition(".")[2])


def is_overlapped(linear: Any) -> bool:
    return isinstance(getattr(linear, "overlap", None), LinearOverlap)


def is_row(linear: Any) -> bool:
    return hasattr(linear, "input_is_parallel")


def is_candidate(linear: Any) -> bool:
    """Whether a linear overlaps, or is of a class that has an overlapped form and is no expert."""
    is_expert = getattr(linear, "is_expert", False) or getattr(linear, "parallel_mode", "column") is None
    return is_overlapped(linear) or (type(linear) in overlapped_forms() and not is_expert)
