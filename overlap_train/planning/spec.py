"""The operators, one row each.

Another operator is another row, with its engines in operators/ and its orders in schedule/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .arguments import (
    all_gather_error,
    all_to_all_error,
    all_to_all_linear_error,
    linear_all_to_all_error,
    reduce_scatter_error,
)
from .schedule.kinds import A2A_GEMM, GATHER, GEMM_A2A, INBOUND, SCATTER


@dataclass(frozen=True)
class OperatorSpec:
    """One operator.

    fprop: the forward engine, GATHER (AG + GEMM), SCATTER (GEMM + RS), A2A_GEMM or GEMM_A2A. Pass.dgrad has the other one.
    error: what is wrong with (x, w, bias, world_size, name), or None. multiplies: False for an exchange alone.
    """

    name: str
    fprop: str
    error: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, int, str], str | None]
    multiplies: bool = True

    @property
    def sends_input(self) -> bool:
        """Whether forward sends the input, which the weight gradient then needs from the peers."""
        return self.fprop in INBOUND

    def global_rows(self, x: torch.Tensor, world_size: int) -> int:
        """M: the rows of all ranks."""
        return x.shape[:-1].numel() * (world_size if self.fprop in (GATHER, GEMM_A2A) else 1)

    def slot_bytes(self, x: torch.Tensor, w: torch.Tensor, world_size: int) -> int:
        """Bytes of a slot: of what forward receives or, if it sends its output, of what backward receives, which is as large."""
        features = (x.shape[-1:] if self.sends_input else w.shape[:1]).numel()
        whole = self.global_rows(x, world_size) * features * x.element_size()
        return whole // world_size if self.fprop == GEMM_A2A else whole


ALL_GATHER_LINEAR = OperatorSpec("all_gather_linear", GATHER, all_gather_error)
LINEAR_REDUCE_SCATTER = OperatorSpec("linear_reduce_scatter", SCATTER, reduce_scatter_error)
LINEAR_ALL_TO_ALL = OperatorSpec("linear_all_to_all", GEMM_A2A, linear_all_to_all_error)
ALL_TO_ALL_LINEAR = OperatorSpec("all_to_all_linear", A2A_GEMM, all_to_all_linear_error)
# Beside a product of another group (ulysses/two_groups.py). x: what one rank sends, the columns of all ranks side by side.
ALL_TO_ALL = OperatorSpec("all_to_all", A2A_GEMM, all_to_all_error, multiplies=False)
