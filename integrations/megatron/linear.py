"""Megatron-Core's parallel linears with their communication overlapped.

The subclasses add no parameter and no buffer, so checkpoints are Megatron's. Each replaces as little as it can: the
column linear only the product (`_forward_impl`), so that bias, tied weights and gathering of the output stay
Megatron's; the row linear `forward`, because Megatron reduces there. A call that cannot overlap (see fallback.py)
runs Megatron's own code and is counted with its reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from overlap_train import OverlapConfig, all_gather_linear, linear_reduce_scatter
from overlap_train.integrations.megatron.fallback import fallback_reason
from overlap_train.integrations.megatron.main_grad import accumulates, through_main_grad

if TYPE_CHECKING:
    ParallelLinear = ColumnParallelLinear | RowParallelLinear


@dataclass
class LinearOverlap:
    """What an overlapped linear knows beyond Megatron's: its settings, its name and what its calls have done."""

    config: OverlapConfig
    slot: str  # one of overlap_train.config.SLOTS
    name: str  # where it is in the model, for error messages
    overlapped_calls: int = 0
    fallback_calls: Counter[str] = field(default_factory=Counter)  # reason -> calls

    def __post_init__(self) -> None:
        self._returning = replace(self.config, main_grad="off")
        self.possible = (self.config, self._returning)  # settings of its calls

    def count(self, reason: str | None) -> None:
        if reason is None:
            self.overlapped_calls += 1
        else:
            self.fallback_calls[reason] += 1

    def settings(self, linear: ParallelLinear, weight: torch.Tensor) -> OverlapConfig:
        """The settings of one call: the weight gradient goes into main_grad only where that is Megatron's way too."""
        return self.config if accumulates(linear, weight, self.config) else self._returning


class OverlappedColumnParallelLinear(ColumnParallelLinear):
    """y = all_gather(x) Wᵀ + b: x [s/W, b, K], weight [N/W, K], y [s, b, N/W]; the gather hides behind the product.

    Takes the arguments of ColumnParallelLinear and `overlap`, the settings (None: the defaults).
    """

    overlap: LinearOverlap

    def __init__(self, *args: Any, overlap: OverlapConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        attach(self, overlap or OverlapConfig(), slot=kwargs.get("tp_comm_buffer_name") or "output")

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        reason = fallback_reason(self, input, weight, kwargs)
        self.overlap.count(reason)
        if reason is not None:
            return super()._forward_impl(input, through_main_grad(self, weight), *args, **kwargs)
        return all_gather_linear(
            input,
            weight,
            kwargs["bias"],
            group=self.tp_group,
            config=self.overlap.settings(self, weight),
            name=self.overlap.name,
        )


class OverlappedRowParallelLinear(RowParallelLinear):
    """y = reduce_scatter(x Wᵀ) + b: x [s, b, K/W], weight [N, K/W], y [s/W, b, N]; the scatter hides behind the
    product.

    Takes the arguments of RowParallelLinear and `overlap`, the settings (None: the defaults).
    """

    overlap: LinearOverlap

    def __init__(self, *args: Any, overlap: OverlapConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        attach(self, overlap or OverlapConfig(), slot=kwargs.get("tp_comm_buffer_name") or "proj")

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(y, None), or (y without b, b) where the caller adds the bias itself (skip_bias_add)."""
        reason = fallback_reason(self, input_, self.weight)
        self.overlap.count(reason)
        if reason is not None:
            return super().forward(input_)
        y = linear_reduce_scatter(
            input_,
            self.weight,
            None if self.skip_bias_add else self.bias,
            group=self.tp_group,
            config=self.overlap.settings(self, self.weight),
            name=self.overlap.name,
        )
        return y, self.bias if self.skip_bias_add else None

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Reached from Megatron's forward only, that is by calls that fall back."""
        return super()._forward_impl(input, through_main_grad(self, weight), *args, **kwargs)


OVERLAPPED: dict[type, type] = {
    ColumnParallelLinear: OverlappedColumnParallelLinear,
    RowParallelLinear: OverlappedRowParallelLinear,
}


def overlapped_class(linear_class: type) -> type:
    """The overlapped class of ColumnParallelLinear or RowParallelLinear. Raises ValueError for any other class."""
    if linear_class not in OVERLAPPED:
        raise ValueError(
            f"linear_class={linear_class!r}: only Megatron-Core's own ColumnParallelLinear and RowParallelLinear have "
            "an overlapped form; use Megatron's local layer spec, not TransformerEngine's"
        )
    return OVERLAPPED[linear_class]


def attach(linear: ParallelLinear, config: OverlapConfig, slot: str, name: str | None = None) -> None:
    """Give a linear of an overlapped class its settings."""
    linear.overlap = LinearOverlap(config, slot, name or slot)
    # Megatron-FSDP recognises parallel linears by the name of their class and, failing that, by these two.
    linear.tensor_model_parallel = True
    linear.partition_dim = 0 if isinstance(linear, ColumnParallelLinear) else 1
