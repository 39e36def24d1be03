"""What an overlapped linear knows beyond Megatron's: its settings, its name, and what its calls have done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron.linears.main_grad import accumulates
from overlap_train.ops.plan import Plan
from overlap_train.select.autotune import Autotune as Trial


@dataclass
class LinearOverlap:
    """The attribute `overlap` of an overlapped linear; no part of a checkpoint."""

    config: OverlapConfig
    slot: str  # linear slot, one of overlap_train.config.SLOTS
    name: str  # where it is in the model, for error messages
    overlapped_calls: int = 0
    fallback_calls: Counter[str] = field(default_factory=Counter)  # reason -> calls
    # Of the last overlapped call: the plan by which it ran (of parts the first one's), and in which trial it took part, if any.
    plan: Plan | None = None
    trial: Trial | None = None
    on_gradient: Callable[[torch.Tensor], None] | None = None  # enable() sets it until the table is printed

    def __post_init__(self) -> None:
        self._returning = replace(self.config, main_grad="off")

    def count(self, reason: str | None) -> None:
        """Count one forward call; `reason` None: it overlaps."""
        if reason is None:
            self.overlapped_calls += 1
        else:
            self.fallback_calls[reason] += 1

    def note_plan(self, plan: Plan, trial: Trial | None) -> None:
        """Keep the plan of this call, and its trial, for the table."""
        self.plan, self.trial = plan, trial

    def settings(self, linear: Any, weight: torch.Tensor) -> OverlapConfig:
        """The settings of one call: the weight gradient goes into main_grad only where Megatron's own code adds it there, too."""
        return self.config if accumulates(linear, weight, self.config) else self._returning

    def watched(self, y: torch.Tensor) -> torch.Tensor:
        """Return y, and let `on_gradient` be called when the gradient of y arrives."""
        if self.on_gradient is not None and y.requires_grad:
            y.register_hook(self.on_gradient)
        return y
