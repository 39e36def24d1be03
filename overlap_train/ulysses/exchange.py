"""KV heads that several ranks need, where a group has more ranks than there are KV heads: the gradients of their copies.

AttentionHeads.sent_rows says which rows of the weight are sent, some of them to several ranks.

What the linears of Ulysses do, part by part, forward and backward.

    to_heads    y = all_to_all(x @ w.T)    rows of x leave, columns of y arrive    dgrad and wgrad: heads_backward
    to_rows     y = all_to_all(x) @ w.T    columns of x arrive                     dgrad and wgrad: rows_backward

`to_rows` and `heads_backward` send the next part before they multiply one. `to_heads` lets the receiving ranks pull a part while
it multiplies the next one (ahead.py).

A call of a Ulysses linear while methods take turns (select/autotune.py): it is timed as a whole.

The exchange of one part runs beside the product of another, so that parts have no times of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch

from ..group.domain import profiled
from ..ops.a2a_gemm import AllToAllGemm
from ..ops.gemm_a2a import GemmAllToAll
from ..ops.table import start_a2a_gemm, start_gemm_a2a
from ..ops.wgrad import WeightGradient
from ..select.autotune import Autotune, TimedScope
from .parts import Give, Part, ProductStep, Read, Step, run_steps
from .rows import Rows


def summed_copies(dy_blocks: torch.Tensor, copies: torch.Tensor, n: int) -> torch.Tensor:
    """dy [rows, N] from [W, rows, N'/W], column i of which belongs to row copies[i] of the weight.

    Copies are added in fp32 and in the order of ranks.
    """
    total = dy_blocks.new_zeros(dy_blocks.shape[1], n, dtype=torch.float32)
    for block, columns in zip(dy_blocks, copies.chunk(len(dy_blocks)), strict=True):
        total[:, columns] += block  # within a block each column comes once
    return total.to(dy_blocks.dtype)


class InParts:
    """A call of a Ulysses linear in parts, with tensor parallelism (two_groups.py) or without. batch: rows of a position."""

    __slots__ = ()  # Linear has its own

    parts: Sequence[Part]
    w: torch.Tensor
    batch: int

    @property
    def keeps(self) -> bool:
        """Whether what `to_rows` receives is kept for the weight gradient, and not sent again."""
        return self.parts[0].exchange.plan.wgrad is None

    def multiplying(self, w: torch.Tensor) -> Self:
        """This call with w as autograd has kept it: hooks on saved tensors (checkpointing) give back another object."""
        return replace(self, w=w)  # type: ignore[type-var]  # of dataclasses

    def rows(self, x: torch.Tensor, part: Part) -> torch.Tensor:
        """The rows of a part of a shard x [positions * batch, C]."""
        return x if len(self.parts) == 1 else x[part.first * self.batch : part.last * self.batch]


@dataclass(slots=True)  # made at each call: frozen it would take 0.6 microseconds more
class Linear(InParts):
    """One call of a Ulysses linear. weight: the parameter [N, K]. w: what is multiplied, the weight or, with `copies`, rows of it
    [N', K].

    copies: int64 [N'], which row of the weight each row of w is. batch: rows of one position.
    """

    parts: tuple[Part, ...]
    weight: torch.Tensor
    w: torch.Tensor
    copies: torch.Tensor | None
    batch: int

    @property
    def main_grad(self) -> str:
        return self.parts[0].exchange.plan.config.main_grad

    @property
    def world_size(self) -> int:
        return self.parts[0].exchange.domain.world_size

    @property
    def rows_of_rank(self) -> int:
        """M/W, of all parts."""
        return self.parts[-1].last * self.batch

    def new_rows(self, features: int) -> torch.Tensor:
        """Memory for [M/W, features]."""
        return self.w.new_empty(self.rows_of_rank, features)

    def gradient(self) -> WeightGradient:
        return WeightGradient(self.weight, self.main_grad, len(self.parts))

    def to_heads(self, x: torch.Tensor, y: Rows) -> torch.Tensor:
        """y = all_to_all(x [M/W, K] @ w.T). Returns what the weight gradient needs of x: x."""
        run_steps([self._leaving(part, part.forward, x, self.w.t(), y) for part in self.parts])
        return x

    def _leaving(
        self, part: Part, step: Callable[[Give, Read], Step], x: torch.Tensor, b_kn: torch.Tensor, y: Rows,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> ProductStep:  # fmt: skip
        """The GEMM + A2A of a part's rows of x. All parts but the last are pulled, if y has a place for their blocks.

        meanwhile: called before the step waits for the part's blocks.
        """

        def read(exchange: GemmAllToAll) -> None:
            meanwhile()
            y.take(part, exchange.received())

        place, one = y.place(part), step(partial(self.rows, x, part), read)
        is_pulled = place is not None and part is not self.parts[-1] and one.plan.may_pull
        return one.with_product(b_kn, place, is_pulled)

    def heads_backward(
        self, x: torch.Tensor | None, dy: Rows, wants_dx: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(dx [M/W, K], dw). x: None if dw is not wanted."""
        dx, gradient = self.new_rows(self.w.shape[1]) if wants_dx else None, self.gradient()

        def multiply(part: Part, receiver: AllToAllGemm) -> None:
            if dx is not None:
                receiver.matmul(self.w, self.rows(dx, part))
            if x is not None or dx is None:  # the peers need what this rank sends, whatever is frozen here
                blocks = receiver.received_view()
            if x is not None:
                ahead = None if part is self.parts[-1] else part.exchange.plan.dgrad
                with profiled(part.exchange.tags.ranges[2]), part.exchange.domain.span.products_beside(ahead):
                    gradient.add(_of_weight(self, blocks), self.rows(x, part))

        run_steps([part.backward(partial(dy.give, part), partial(multiply, part)) for part in self.parts])
        return dx, gradient.result() if x is not None else None

    def to_rows(self, x: Rows, keep: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(y [M/W, N] = all_to_all(x) @ w.T, what each part has received [W, rows, K/W] if it is kept)."""
        y, kept = self.new_rows(self.w.shape[0]), []

        def multiply(part: Part, receiver: AllToAllGemm) -> None:
            receiver.matmul(self.w.t(), self.rows(y, part))
            if keep:
                kept.append(receiver.received_copy())

        run_steps([part.forward(partial(x.give, part), partial(multiply, part)) for part in self.parts])
        return y, kept

    def rows_backward(
        self, x: Rows | list[torch.Tensor] | None, dy: torch.Tensor, dx: Rows | None
    ) -> torch.Tensor | None:
        """Write dx and return dw [N, K] of to_rows.

        Args:
            x: the rows to send again, or what forward received and kept; None: dw is not wanted.
            dx: where to write dx; None: it is not wanted.
        """
        if x is None or isinstance(x, list):
            return self._rows_backward_alone(x, dy, dx)
        gradient = self.gradient()
        for part in self.parts:
            domain, plan, tags = part.exchange.domain, part.exchange.plan, part.exchange.tags
            assert plan.wgrad is not None, "what forward has received was not kept"
            exchange = None
            with part.exchange.backward[dx is not None, True]:
                receiver = start_a2a_gemm(domain, plan.wgrad, tags.wgrad, x.give(part))
                if dx is not None:
                    dy_rows, place = self.rows(dy, part), dx.place(part)
                    exchange = start_gemm_a2a(domain, plan.dgrad, tags.dgrad, dy_rows, self.w, place)
                self._add(gradient, dy, dx, part, receiver.received_view())
                if exchange is not None and dx is not None:
                    dx.take(part, exchange.received())
        return gradient.result()

    def _rows_backward_alone(
        self, kept: list[torch.Tensor] | None, dy: torch.Tensor, dx: Rows | None
    ) -> torch.Tensor | None:
        """Write dx and return dw of to_rows, and send nothing again. kept: what each part received in forward; None: dw is not
        wanted."""
        gradient = self.gradient()
        adds: list[Callable[[], None]] = [lambda: None] * len(self.parts)
        if kept is not None:
            adds = [partial(self._add, gradient, dy, dx, *of_part) for of_part in zip(self.parts, kept, strict=True)]
        if dx is not None:
            turns = zip(self.parts, adds, strict=True)
            steps = [(part, part.backward_alone if kept is None else part.backward, add) for part, add in turns]
            run_steps([self._leaving(part, step, dy, self.w, dx, add) for part, step, add in steps])
        else:
            for add in adds:
                add()
        return None if kept is None else gradient.result()

    def _add(
        self, gradient: WeightGradient, dy: torch.Tensor, dx: Rows | None, part: Part, blocks: torch.Tensor
    ) -> None:
        """Add to dw the product of a part's dy and the blocks [W, rows, K/W] that it received. Meanwhile dx leaves, if it is
        wanted."""
        dy_rows, started = self.rows(dy, part), None if dx is None else part.exchange.plan.dgrad
        with profiled(part.exchange.tags.ranges[2]), part.exchange.domain.span.products_beside(started):
            gradient.add(dy_rows, blocks.view(self.world_size, len(dy_rows), -1))


def _of_weight(linear: Linear, dy_blocks: torch.Tensor) -> torch.Tensor:
    """dy in the columns of the weight's rows: the blocks as they are, or [rows, N] with the copies of a column summed."""
    if linear.copies is None:
        return dy_blocks
    return summed_copies(dy_blocks, linear.copies, linear.weight.shape[0])


@dataclass
class TimedLinear(Linear):
    """A call that is timed, for a trial: forward, and backward where it gives an input gradient."""

    trial: Autotune
    name: str
    method: str

    def _timed(self, kind: str) -> AbstractContextManager[None]:
        work = self.rows_of_rank * self.world_size * self.w.numel()  # of all parts
        return TimedScope(nullcontext(), self.trial, self.name, kind, self.method, work)

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
