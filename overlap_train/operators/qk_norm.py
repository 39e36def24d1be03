"""RMSNorm of each head of q and of k, between the bias and the rotation of attention_layout.py.

    y = x / rms(x) * weight       rms(x) = sqrt(mean(x²) + eps) over the head's dim features
    dx = (g - n mean(g n)) / rms(x)       with n = x / rms(x) and g = dy * weight
    dweight = sum of dy n over rows and heads, in fp32

Everything is computed in fp32. x, y, dy and dx are rounded to the dtype of the activations, where torch.nn.RMSNorm rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch


@dataclass(frozen=True)
class QkNorm:
    """RMSNorm of each head of q and of k, before the rotation: y = x / sqrt(mean(x²) + eps) * weight.

        q_weight, k_weight  [dim]   the same on every rank, of any floating dtype

    zero_centered: weights are distances from one, y = x / sqrt(mean(x²) + eps) * (1 + weight), as Megatron's
    layernorm_zero_centered_gamma.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float
    zero_centered: bool = False

    @property
    def meaning(self) -> str:
        """What ranks must agree on, in words. Weights are not compared."""
        return _normalised(self.eps, self.zero_centered)

    def having(self, q_weight: torch.Tensor, k_weight: torch.Tensor) -> QkNorm:
        """This norm with its weights as autograd has kept them: hooks on saved tensors (checkpointing) give back other
        objects."""
        return replace(self, q_weight=q_weight, k_weight=k_weight)

    def error(self, dim: int, device: torch.device, name: str) -> str | None:
        """Why heads of `dim` features on `device` cannot be normalised, or None."""
        q, k = self.q_weight, self.k_weight
        if not isinstance(self.eps, int | float) or not self.eps > 0:
            return f"{name}: qk_norm.eps={self.eps!r} must be a number above 0, such as 1e-6"
        if q.shape != (dim,) or k.shape != (dim,):
            return f"{name}: qk_norm has weights {tuple(q.shape)} and {tuple(k.shape)}; both must be [{dim}], a head's features"
        if q.device != device or k.device != device:
            return (
                f"{name}: qk_norm has weights on {q.device} and {k.device}, the input is on {device}; move them there"
            )
        return None


@lru_cache(maxsize=32)  # calls have an object each
def _normalised(eps: float, zero_centered: bool) -> str:
    return f"normalised with eps {eps:g}" + " around one" * zero_centered


class HeadNorm:
    """What one call normalises with. Rows come and go in parts; `rows` [r] says which rows of the sequence a part has.

    before            [s, b, kv, query / kv + 1, dim]: of each group its query heads and k, before the norm; None: nothing is kept
    weight_gradients  fp32 [2, dim], of q_weight and k_weight: what all parts add up to
    """

    def __init__(self, norm: QkNorm, before: torch.Tensor | None) -> None:
        self.norm, self.before = norm, before
        self.weight_gradients = torch.zeros(2, len(norm.q_weight), dtype=torch.float32, device=norm.q_weight.device)

    def apply(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """x [r, b, kv, query / kv + 1, dim], normalised. It is kept for backward."""
        if self.before is not None:
            self.before[rows] = x
        return (x.float() * self._inverse_rms(x) * self._scales(x.shape[3])).to(x.dtype)

    def gradient(self, dy: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """dx of the rows that were kept, from dy of the same shape; adds to the weights' gradients."""
        assert self.before is not None
        x, g = self.before[rows], dy.float()
        inverse = self._inverse_rms(x)
        normalised = x.float() * inverse
        of_head = (g * normalised).sum((0, 1, 2))
        self.weight_gradients += torch.stack((of_head[:-1].sum(0), of_head[-1]))
        g = g * self._scales(x.shape[3])
        return ((g - normalised * (g * normalised).mean(-1, keepdim=True)) * inverse).to(dy.dtype)

    def of_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of q_weight and k_weight, in their dtypes."""
        q, k = self.weight_gradients
        return q.to(self.norm.q_weight.dtype), k.to(self.norm.k_weight.dtype)

    def _inverse_rms(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.norm.eps)

    def _scales(self, heads: int) -> torch.Tensor:
        """fp32 [heads, dim]: query heads, then k."""
        q, k = (weight.float() + float(self.norm.zero_centered) for weight in (self.norm.q_weight, self.norm.k_weight))
        return torch.cat((q.expand(heads - 1, -1), k[None]))
