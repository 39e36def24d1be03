"""The operators, one row each: what runs forward, what computes the input gradient, and what the weight gradient needs.

Another operator is another row, with its engines in operators/ and its orders in schedule.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .arguments import all_gather_error, reduce_scatter_error
from .schedule import GATHER, SCATTER

GATHERED_X, GATHERED_DY = "x, gathered again or kept", "dy, as gathered for dgrad"


@dataclass(frozen=True)
class OperatorSpec:
    """One operator.

    fprop, dgrad: the engine, GATHER (AG + GEMM) or SCATTER (GEMM + RS). wgrad: the full operand of the weight gradient.
    error: what is wrong with (x, w, bias, world_size, name), or None.
    """

    name: str
    fprop: str
    dgrad: str
    wgrad: str
    error: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, int, str], str | None]

    def global_rows(self, x: torch.Tensor, world_size: int) -> int:
        """M: the rows of the gathered tensor."""
        return x.shape[:-1].numel() * (world_size if self.fprop == GATHER else 1)

    def slot_bytes(self, x: torch.Tensor, w: torch.Tensor, world_size: int) -> int:
        """Of what its gather receives, which is as large as what its scatter receives."""
        features = x.shape[-1:] if self.fprop == GATHER else w.shape[:1]
        return self.global_rows(x, world_size) * features.numel() * x.element_size()


ALL_GATHER_LINEAR = OperatorSpec("all_gather_linear", GATHER, SCATTER, GATHERED_X, all_gather_error)
LINEAR_REDUCE_SCATTER = OperatorSpec("linear_reduce_scatter", SCATTER, GATHER, GATHERED_DY, reduce_scatter_error)
