"""Megatron-Core's own parallel linears with their communication overlapped.

The subclasses add no parameter and no buffer, therefore checkpoints are Megatron's. Each replaces as little as possible. The
column linear replaces the product (`_forward_impl`): bias, tied weights and gathering of the output stay Megatron's. The row
linear replaces `forward`, because Megatron reduces there. A call that cannot overlap (conditions.py) runs Megatron's own code and
is counted with its reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from overlap_train import all_gather_linear, linear_reduce_scatter
from overlap_train.integrations.megatron.linears.conditions import fallback_reason
from overlap_train.integrations.megatron.linears.main_grad import fused_alike, through_main_grad
from overlap_train.integrations.megatron.linears.state import LinearOverlap

if TYPE_CHECKING:
    ParallelLinear = ColumnParallelLinear | RowParallelLinear


class OverlappedColumnParallelLinear(ColumnParallelLinear):
    """y = all_gather(x) Wᵀ + b: x [s/W, b, K], weight [N/W, K], y [s, b, N/W]; the product hides the gather.

    enable() makes it of a ColumnParallelLinear; it has no settings before.
    """

    overlap: LinearOverlap

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        overlap = self.overlap
        reason = fallback_reason(self, input, weight, kwargs)
        overlap.count(reason)
        if reason is not None:
            call = fused_alike(self, weight, kwargs)
            return overlap.watched(super()._forward_impl(input, through_main_grad(self, weight), *args, **call))
        settings = overlap.settings(self, weight)
        y = all_gather_linear(
            input, weight, kwargs["bias"], group=self.tp_group, config=settings, name=overlap.name, on_plan=overlap.note_plan
        )  # fmt: skip
        return overlap.watched(y)


class OverlappedRowParallelLinear(RowParallelLinear):
    """y = reduce_scatter(x Wᵀ) + b: x [s, b, K/W], weight [N, K/W], y [s/W, b, N]; the product hides the scatter.

    enable() makes it of a RowParallelLinear; it has no settings before.
    """

    overlap: LinearOverlap

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(y, None), or (y without b, b) where the caller adds the bias itself (skip_bias_add)."""
        overlap = self.overlap
        reason = fallback_reason(self, input_, self.weight)
        overlap.count(reason)
        if reason is not None:
            y, bias = super().forward(input_)
            return overlap.watched(y), bias
        bias, settings = None if self.skip_bias_add else self.bias, overlap.settings(self, self.weight)
        y = linear_reduce_scatter(
            input_, self.weight, bias, group=self.tp_group, config=settings, name=overlap.name, on_plan=overlap.note_plan
        )  # fmt: skip
        return overlap.watched(y), self.bias if self.skip_bias_add else None

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Megatron's forward calls it, that is: calls that fall back do."""
        call = fused_alike(self, weight, kwargs)
        return super()._forward_impl(input, through_main_grad(self, weight), *args, **call)


OVERLAPPED: dict[type, type] = {
    ColumnParallelLinear: OverlappedColumnParallelLinear,
    RowParallelLinear: OverlappedRowParallelLinear,
}


def attach(linear: ParallelLinear, overlap: LinearOverlap) -> None:
    """Give a linear of an overlapped class its settings."""
    linear.overlap = overlap
    # Megatron-FSDP recognises parallel linears by the name of their class and, failing that, by these two.
    linear.tensor_model_parallel = True
    linear.partition_dim = 0 if isinstance(linear, ColumnParallelLinear) else 1
