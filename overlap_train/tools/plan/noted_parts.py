"""The parts of a projection under TP x Ulysses as the planner runs them (replay.py): their products and passes are noted.

A part's product is what simulation/programs.py and backward.py say of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ...ops.wgrad import WeightGradient
from ...schedule.order import SCATTER
from ...ulysses.parts import Part as Positions
from ...ulysses.two_groups import ShardedPart
from .replay import Domain, Recording
from .simulation.backward import row_dw, row_dx, whole
from .simulation.enqueued import Part
from .simulation.programs import forward
from .simulation.work import Work


@dataclass(frozen=True)
class NotedPart(ShardedPart):
    """A ShardedPart whose products are noted. fprop, dgrad: of its product."""

    fprop: Work
    dgrad: Work

    def column_forward(self, x_shard_m: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with self.product.forward:
            self._note(forward, self.fprop, self.fprop.plan.slots)
        return self._result(self.fprop), x_shard_m

    def column_backward(
        self, dy: torch.Tensor, x: torch.Tensor | None, w: torch.Tensor, dw: WeightGradient | None, wants_dx: bool
    ) -> torch.Tensor:
        again = self.product.plan.wgrad
        assert again is not None and wants_dx, "plans are for training with all gradients"
        with self.product.backward(wants_dx, dw is not None):
            self._note(whole, self.dgrad, again.slots + self.dgrad.plan.slots)
        return self._result(self.dgrad)

    def row_forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self.column_forward(x, w)[0]

    def row_backward(
        self, dy_shard_m: torch.Tensor, x: Callable[[], torch.Tensor], w: torch.Tensor, dw: WeightGradient | None,
        wants_dx: bool,
    ) -> torch.Tensor:  # fmt: skip
        with self.product.backward(True, dw is not None):
            work = self._note(row_dx, self.dgrad, self.dgrad.plan.slots)
            blocks = len(x())
            self._recording.add(([row_dw(replace(work, x_blocks=blocks))], []))
        return self._result(self.dgrad)

    @property
    def _domain(self) -> Domain:
        return self.product.domain  # type: ignore[return-value]

    @property
    def _recording(self) -> Recording:
        return self._domain.recording

    def _note(self, engine: Callable[[Work], Part], work: Work, slots: int) -> Work:
        """Note what an engine enqueues, which takes so many slots."""
        for _ in range(slots):
            self._domain.workspace.use.take()
        numbered = self._recording.numbered(work, self._domain.group)
        self._recording.add(engine(numbered))
        return numbered

    def _result(self, work: Work) -> torch.Tensor:
        rows = work.m_shard if work.plan.kind == SCATTER else work.pass_.m
        return torch.empty(rows, work.pass_.n, dtype=work.pass_.dtype, device="meta")


@dataclass(frozen=True)
class NotedHeads:
    """Rows of q, k and v, as HeadRows (ulysses/rows.py): a kernel takes them out of the slot, or packs them. columns: of what
    one rank sends to one. rows: of one position, of all tensor-parallel ranks. angle_bytes: of cos and sin for the rows of one
    position of all ranks."""

    recording: Recording
    columns: int
    rows: int
    angle_bytes: float

    def place(self, part: Positions) -> None:
        return None

    def take(self, part: Positions, received: torch.Tensor) -> None:
        self._move("unpack", part, received)

    def give(self, part: Positions) -> torch.Tensor:
        shape = self.recording.grid.ulysses.topology.world, (part.last - part.first) * self.rows, self.columns
        packed = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        self._move("pack", part, packed)
        return packed

    def _move(self, name: str, part: Positions, blocks: torch.Tensor) -> None:
        self.recording.copy(name, blocks.nbytes + (part.last - part.first) * self.angle_bytes / 2)
