"""A call of a Ulysses linear while methods take turns (select/autotune.py): it is timed as a whole.

The exchange of one part runs beside the product of another, so that parts have no times of their own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ..select.autotune import Autotune as Trial
from ..select.autotune import Timed, TimedBracket
from .exchange import Linear
from .rows import Rows


@dataclass
class TimedLinear(Linear):
    """A call that is timed, for a trial: forward, and backward where it gives an input gradient."""

    trial: Trial
    name: str
    method: str

    def _timed(self, kind: str) -> AbstractContextManager[None]:
        work = self.rows_of_rank * self.world_size * self.w.numel()  # of all parts
        return TimedBracket(nullcontext(), self.trial, Timed(self.name, kind, self.method, work))

    def _timed_backward(self, wants_dx: bool) -> AbstractContextManager[None]:
        return self._timed(self.trial.fprop.dgrad.kind) if wants_dx else nullcontext()

    def to_heads(self, x: torch.Tensor, y: Rows) -> torch.Tensor:
        with self._timed(self.trial.fprop.kind):
            return super().to_heads(x, y)

    def to_rows(self, x: Rows, keep: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with self._timed(self.trial.fprop.kind):
            return super().to_rows(x, keep)

    def heads_backward(
        self, x: torch.Tensor | None, dy: Rows, wants_dx: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        with self._timed_backward(wants_dx):
            return super().heads_backward(x, dy, wants_dx)

    def rows_backward(
        self, x: Rows | list[torch.Tensor] | None, dy: torch.Tensor, dx: Rows | None
    ) -> torch.Tensor | None:
        with self._timed_backward(dx is not None):
            return super().rows_backward(x, dy, dx)
