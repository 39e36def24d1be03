"""RMSNorm and LayerNorm for sequence parallelism.

Under sequence parallelism every rank normalises its own rows [s/W, b, h], so the gradient of the scale is a partial sum. Megatron
reduces it over the tensor-parallel group only for parameters that carry `sequence_parallel = True`. Parameters are named `weight`
(and `bias`), as in Megatron's own norms, so checkpoints are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.Module):
    """y = x / sqrt(mean(x², -1) + eps) * weight; x [..., hidden_size], y of the same shape in the dtype of `weight`. With
    `zero_centered` y = x / rms(x) * (1 + weight). Statistics are computed in fp32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = _parameter(0.0 if self.zero_centered else 1.0, hidden_size, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, x = _scale_and_input(self.weight, x, self.zero_centered)
        return F.rms_norm(x, (self.hidden_size,), scale, self.eps).to(self.weight.dtype)


class LayerNorm(RMSNorm):
    """y = (x - mean) / sqrt(var + eps) * weight + bias; shapes, dtypes and `zero_centered` as in RMSNorm."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = _parameter(0.0, hidden_size, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, x = _scale_and_input(self.weight, x, self.zero_centered)
        return F.layer_norm(x, (self.hidden_size,), scale, self.bias.to(scale.dtype), self.eps).to(self.weight.dtype)


class Norm:
    """The norm that `config.normalization` names, with the constructor of Megatron's WrappedTorchNorm. A class and no function:
    Megatron-Core 0.16 puts a function into the model as it is. Raises ValueError for another `config.normalization`."""

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False, normalization: str = "LayerNorm",
    ) -> RMSNorm:  # fmt: skip
        """The last three arguments are Megatron's; like Megatron's own norm this reads `config` instead."""
        kinds = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
        if config.normalization not in kinds:
            raise ValueError(
                f"config.normalization={config.normalization!r}: a sequence-parallel norm exists for "
                f"{' and '.join(map(repr, kinds))}; choose one of them or put your own norm into the layer spec"
            )
        return kinds[config.normalization](config, hidden_size, eps)


def _parameter(value: float, size: int, config: TransformerConfig) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.full((size,), value, dtype=config.params_dtype))
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


def _scale_and_input(weight: torch.Tensor, x: torch.Tensor, zero_centered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """One dtype for both: their own where they agree, else fp32 (fp32 residuals, or 1 + weight, which 16 bits
    round)."""
    if zero_centered:
        return 1.0 + weight.float(), x.float()
    if x.dtype == weight.dtype:
        return weight, x
    return weight.float(), x.float()
