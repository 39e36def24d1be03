"""TransformerEngine's parallel linears, as Megatron-Core wraps them, with their communication overlapped.

    TELayerNormColumnParallelLinear   TE's norm, then our all-gather + GEMM
    TEColumnParallelLinear            our all-gather + GEMM
    TERowParallelLinear               our GEMM + reduce-scatter

As with Megatron's own linears only the class of the built module changes, to a subclass of what it was: parameters, their
attributes, checkpoint keys and TE's extra state stay, and a call that cannot overlap is TE's own. The norm is one that
TENorm builds; it is kept outside the module and uses the module's own `layer_norm_weight` and `layer_norm_bias`.

The 16-bit and fp32 paths only: fp8 and fp4 belong to TE (conditions.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.extensions import transformer_engine as megatron_te

from overlap_train import OverlapConfig, all_gather_linear, linear_reduce_scatter
from overlap_train.integrations.megatron.fallback import fallback_reason, standing_reason
from overlap_train.integrations.megatron.linear import OVERLAPPED, LinearOverlap

if TYPE_CHECKING:
    import torch.distributed as dist

    Output = tuple[torch.Tensor, torch.Tensor | None]


@dataclass
class TELinearOverlap(LinearOverlap):
    """LinearOverlap, and the norm of a TELayerNormColumnParallelLinear, made at its first call."""

    norm: torch.nn.Module | None = None

    def settings(self, linear: Any, weight: torch.Tensor) -> OverlapConfig:
        """TE's own calls add into main_grad under gradient accumulation fusion only, and the two must agree."""
        return super().settings(linear, weight) if linear.fuse_wgrad_accumulation else self._returning


class _OverlappedTELinear:
    """What fallback.py asks of a linear, answered from TE's attributes. Mixed in before one of Megatron's TE classes."""

    overlap: TELinearOverlap
    config: Any
    weight: torch.Tensor
    bias: torch.Tensor
    te_return_bias: bool
    use_bias: bool
    fuse_wgrad_accumulation: bool
    tp_group: dist.ProcessGroup

    is_expert = explicit_expert_comm = False  # such linears are never given this class

    @property
    def gradient_accumulation_fusion(self) -> bool:
        return self.fuse_wgrad_accumulation

    @property
    def gtp_remat_size(self) -> int:
        return getattr(self.weight, "gtp_remat_size", None) or 1

    def forward(self, x: torch.Tensor) -> Output:
        """(y, None), or (y without b, b) where the caller adds the bias itself; x and y as in linear.py."""
        reason = _te_reason(self) or fallback_reason(self, x, self.weight)
        self.overlap.count(reason)
        if reason is not None:
            return super().forward(x)  # type: ignore[misc]
        y = self._multiply(x, self.bias if self.use_bias and not self.te_return_bias else None)
        return y, self.bias if self.te_return_bias else None

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError


class _OverlappedTEColumn(_OverlappedTELinear):
    """x [s/W, b, K] -> y [s, b, N/W]."""

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        settings = self.overlap.settings(self, self.weight)
        return all_gather_linear(x, self.weight, bias, group=self.tp_group, config=settings, name=self.overlap.name)


class _OverlappedTELayerNormColumn(_OverlappedTEColumn):
    """x [s/W, b, K] -> y [s, b, N/W] of the normalised x."""

    layer_norm_weight: torch.nn.Parameter
    layer_norm_bias: torch.nn.Parameter | None

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super()._multiply(self._norm()(x), bias)

    def _norm(self) -> torch.nn.Module:
        """TE's norm over this module's parameters, whichever objects they are now (meta device, conversions)."""
        norm = self.overlap.norm
        if norm is None:
            norm = megatron_te.TENorm(self.config, self.layer_norm_weight.numel(), self.config.layernorm_epsilon)
            self.overlap.norm = norm
        if norm.weight is not self.layer_norm_weight:
            norm.weight = self.layer_norm_weight
        if getattr(self, "layer_norm_bias", None) is not None and norm.bias is not self.layer_norm_bias:
            norm.bias = self.layer_norm_bias
        return norm


class _OverlappedTERow(_OverlappedTELinear):
    """x [s, b, K/W] -> y [s/W, b, N]."""

    input_is_parallel = True

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        settings = self.overlap.settings(self, self.weight)
        return linear_reduce_scatter(x, self.weight, bias, group=self.tp_group, config=settings, name=self.overlap.name)


@cache
def _forms() -> dict[type, type]:
    """Megatron's class -> its overlapped subclass, of the same name: Megatron-FSDP and PEFT tools go by names."""
    if not megatron_te.HAVE_TE:
        return {}
    mixins = {
        megatron_te.TELayerNormColumnParallelLinear: _OverlappedTELayerNormColumn,
        megatron_te.TEColumnParallelLinear: _OverlappedTEColumn,
        megatron_te.TERowParallelLinear: _OverlappedTERow,
    }
    forms = {
        own: type(own.__name__, (mixin, own), {"__module__": __name__, "__doc__": mixin.__doc__})
        for own, mixin in mixins.items()
    }
    # report() knows overlapped linears as values of OVERLAPPED. TE's own classes are no keys of it: what enable() and
    # report() ask of a linear that is not overlapped yet, they have not.
    OVERLAPPED.update({form: form for form in forms.values()})
    return forms


def is_te_linear(linear: Any) -> bool:
    """Whether `linear` is a TransformerEngine linear of Megatron's outside experts, overlapped or not."""
    forms = _forms()
    return type(linear) in (*forms, *forms.values()) and linear.parallel_mode is not None


def overlap_te_linear(linear: Any, config: OverlapConfig, slot: str, name: str) -> None:
    """Overlap `linear`, in place, if it is TransformerEngine's and nothing stands against it for good."""
    form = _forms().get(type(linear))
    if form is None or not is_te_linear(linear):
        return
    own = type(linear)
    linear.__class__ = form
    if _te_reason(linear) is not None or standing_reason(linear, weight=None) is not None:
        linear.__class__ = own
        return
    linear.overlap = TELinearOverlap(config, slot, name)


def _te_reason(linear: Any) -> str | None:
    """What TE does in its linears that ours do not."""
    if getattr(linear, "te_quant_params", None) is not None:
        return "quantized by TransformerEngine (te_quant_params)"
    if getattr(linear.config, "delay_wgrad_compute", False):
        return "delay_wgrad_compute: TransformerEngine computes the weight gradient later"
    return None
