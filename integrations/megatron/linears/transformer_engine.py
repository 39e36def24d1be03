"""TransformerEngine's parallel linears, as Megatron-Core wraps them, with their communication overlapped.

    TELayerNormColumnParallelLinear   TE's norm, then our all-gather + GEMM
    TEColumnParallelLinear            our all-gather + GEMM
    TERowParallelLinear               our GEMM + reduce-scatter

Only the class of the built module changes, to a subclass of what it was: parameters, their attributes, checkpoint keys and TE's
extra state stay. A call that cannot overlap runs TE's own code. TENorm builds the norm; it is kept outside the module and uses
the module's own `layer_norm_weight` and `layer_norm_bias`. fp8 and fp4 belong to TE (conditions.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as megatron_te

from overlap_train import OverlapConfig, all_gather_linear, linear_reduce_scatter
from overlap_train.integrations.megatron.linears.conditions import fallback_reason, standing_reason
from overlap_train.integrations.megatron.linears.main_grad import is_fused
from overlap_train.integrations.megatron.linears.state import LinearOverlap


@dataclass
class TELinearOverlap(LinearOverlap):
    """LinearOverlap, and the norm of a TELayerNormColumnParallelLinear, made at its first call."""

    norm: torch.nn.Module | None = None

    def settings(self, linear: Any, weight: torch.Tensor) -> OverlapConfig:
        """TE's own calls add into main_grad under gradient accumulation fusion only, and the two must agree."""
        return super().settings(linear, weight) if linear.fuse_wgrad_accumulation else self._returning


class TEFallback:
    """TE's own forward, for calls that fall back. Mixed in before one of Megatron's TE classes."""

    @property
    def gradient_accumulation_fusion(self: Any) -> bool:
        """TransformerEngine's fuse_wgrad_accumulation, under the name that Megatron's own linears have for it."""
        return self.fuse_wgrad_accumulation

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """TE's forward notes for its backward whether to fuse (main_grad.py: is_fused)."""
        fuses, self.fuse_wgrad_accumulation = self.fuse_wgrad_accumulation, is_fused(self, self.weight)
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.fuse_wgrad_accumulation = fuses


class _OverlappedTEColumn(TEFallback):
    """x [s/W, b, K] -> y [s, b, N/W]. Mixed in before one of Megatron's TE classes, which has the attributes used here."""

    operator: Callable[..., torch.Tensor] = staticmethod(all_gather_linear)

    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(y, None), or (y without b, b) where the caller adds the bias itself."""
        overlap = self.overlap
        reason = te_feature(self) or fallback_reason(self, x, self.weight)
        overlap.count(reason)
        if reason is not None:
            y, bias = super().forward(x)
            return overlap.watched(y), bias
        bias, settings = self.bias if self.use_bias else None, overlap.settings(self, self.weight)
        added, returned = (None, bias) if self.te_return_bias else (bias, None)
        y = self.operator(
            self._normed(x), self.weight, added, group=self.tp_group, config=settings, name=overlap.name,
            on_plan=overlap.note_plan,
        )  # fmt: skip
        return overlap.watched(y), returned

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _OverlappedTELayerNormColumn(_OverlappedTEColumn):
    """x [s/W, b, K] -> y [s, b, N/W] of the normalised x."""

    def _normed(self: Any, x: torch.Tensor) -> torch.Tensor:
        return normed(self, x)


class _OverlappedTERow(_OverlappedTEColumn):
    """x [s, b, K/W] -> y [s/W, b, N]."""

    input_is_parallel = True
    operator = staticmethod(linear_reduce_scatter)


def normed(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """x by TE's norm over the parameters of a linear with a norm, whichever objects they are now (meta device, conversions)."""
    if not isinstance(getattr(linear, "layer_norm_weight", None), torch.Tensor):
        return x
    norm = linear.overlap.norm
    if norm is None:
        norm = megatron_te.TENorm(linear.config, linear.layer_norm_weight.numel(), linear.config.layernorm_epsilon)
        linear.overlap.norm = norm
    if norm.weight is not linear.layer_norm_weight:
        norm.weight = linear.layer_norm_weight
    if getattr(linear, "layer_norm_bias", None) is not None and norm.bias is not linear.layer_norm_bias:
        norm.bias = linear.layer_norm_bias
    return norm(x)


@cache
def te_forms() -> dict[type, type]:
    """Megatron's class -> its overlapped subclass, of the same name: Megatron-FSDP and PEFT tools go by names."""
    if not megatron_te.HAVE_TE:
        return {}
    mixins = {
        megatron_te.TELayerNormColumnParallelLinear: _OverlappedTELayerNormColumn,
        megatron_te.TEColumnParallelLinear: _OverlappedTEColumn,
        megatron_te.TERowParallelLinear: _OverlappedTERow,
    }
    return {
        own: type(own.__name__, (mixin, own), {"__module__": __name__, "__doc__": mixin.__doc__})
        for own, mixin in mixins.items()
    }


def is_te_linear(linear: Any) -> bool:
    """Whether `linear` is one of TransformerEngine's that has an overlapped form but is not overlapped yet."""
    return type(linear) in te_forms()


def standing_te_reason(linear: Any) -> str | None:
    """Why every call of a TransformerEngine linear is TE's own; None where nothing stands against overlap."""
    return standing_reason(linear, weight=None) or te_feature(linear)


def overlap_te_linear(linear: Any, config: OverlapConfig, slot: str, name: str) -> None:
    """Overlap a linear for which `standing_te_reason` is None, in place."""
    linear.__class__ = te_forms()[type(linear)]
    linear.overlap = TELinearOverlap(config, slot, name)


def fused_mlp(model: torch.nn.Module) -> str | None:
    """The class of an MLP in a model that TransformerEngine's op fuser computes without calling its linears; None: there is none.

    Asked of the modules: a spec is given `use_te_op_fuser`, and Megatron-Core 0.16 notes it nowhere in the model's settings.
    """
    fused = getattr(megatron_te, "TEFusedMLP", None)
    found = () if fused is None else (type(module).__name__ for module in model.modules() if isinstance(module, fused))
    return next(iter(found), None)


def te_feature(linear: Any) -> str | None:
    """What TE would do in its linears that ours do not."""
    if getattr(linear, "te_quant_params", None) is not None:
        return "quantized by TransformerEngine (te_quant_params)"
    if getattr(linear.config, "delay_wgrad_compute", False):
        return "delay_wgrad_compute: TransformerEngine computes the weight gradient later"
    return None
