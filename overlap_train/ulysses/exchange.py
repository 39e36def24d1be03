"""What the linears of Ulysses do, part by part, forward and backward; weights are whole (else: two_groups.py).

    to_heads    y = all_to_all(x @ w.T)    rows of x leave, columns of y arrive    dgrad and wgrad: heads_backward
    to_rows     y = all_to_all(x) @ w.T    columns of x arrive                     dgrad and wgrad: rows_backward

`to_rows` and `heads_backward` send the next part before they multiply one. `to_heads` lets the receiving ranks pull a part while
it multiplies the next one. All parts of a call run by one method. Where methods take turns, the first part asks which one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from ..config import OverlapConfig
from ..group.domain import profiled
from ..group.registry import domain_of
from ..ops.a2a_gemm import AllToAllGemm
from ..ops.gemm_a2a import GemmAllToAll
from ..ops.plan_cache import OnPlan, plan_of, refuse
from ..ops.planned import Planned
from ..ops.spec import ALL_TO_ALL_LINEAR, LINEAR_ALL_TO_ALL, OperatorSpec
from ..ops.wgrad import WeightGradient
from ..select.autotune import Autotune, TimedScope
from .attention_layout import Heads, Rotary, pack, unpack
from .layout import AttentionHeads
from .parts import Factor, Give, Part, Read, Step, cut_exchange, run_steps

_UNTIMED = nullcontext()


class Rows:
    """The rows of all ranks in a tensor of the caller, with this rank's part of the features."""

    def place(self, part: Part) -> torch.Tensor | None:
        """The memory for the blocks [W, rows, C] of a part if they stay as they arrive; None: `take` writes them elsewhere."""
        return None

    def take(self, part: Part, received: torch.Tensor) -> None:
        """Write the blocks [W, rows, C] that have arrived for a part to where they belong, if `place` has not put them there."""

    def give(self, part: Part) -> torch.Tensor:
        """The blocks [W, rows, C] of a part that are sent, each contiguous."""
        raise NotImplementedError


class RankRows(Rows):
    """x [M, C] or [s, b, C], rank after rank: block r are the positions of rank r, `batch` rows each."""

    def __init__(self, x: torch.Tensor, world_size: int, batch: int) -> None:
        self.x, self._world, self._batch = x, world_size, batch

    def place(self, part: Part) -> torch.Tensor:
        return self.give(part)

    def give(self, part: Part) -> torch.Tensor:
        blocks = self.x.view(self._world, -1, self.x.shape[-1])
        first, last = part.first * self._batch, part.last * self._batch
        return blocks if last - first == blocks.shape[1] else blocks[:, first:last]


class SequenceRows(Rows):
    """x [s, b, C] in the order of the sequence. rows: int64 [W, positions], or [W, T, positions], which of them each rank has.
    is_padded: some are -1. Padding is sent as zeros, and what arrives of it is written to row s, which x then has, too."""

    def __init__(self, x: torch.Tensor, rows: torch.Tensor, is_padded: bool) -> None:
        self.x, self._rows, self._is_padded = x, rows, is_padded

    def take(self, part: Part, received: torch.Tensor) -> None:
        rows = rows_of(self._rows, part)
        self.x[rows] = received.reshape(len(rows), *self.x.shape[1:])

    def give(self, part: Part) -> torch.Tensor:
        rows = rows_of(self._rows, part)
        sent = self.x.index_select(0, rows.clamp(min=0) if self._is_padded else rows)
        if self._is_padded:
            sent.masked_fill_((rows < 0).view(-1, 1, 1), 0)
        return sent.view(len(self._rows), -1, self.x.shape[-1])


class HeadRows(Rows):
    """q [s, b, query, dim], k and v [s, b, kv, dim], or gradients. rows: as of SequenceRows. bias: added to what is taken."""

    sums = False  # whether `give` adds up what it returns
    total: torch.Tensor | float = 0.0  # in fp32, of each column

    def __init__(self, rows: torch.Tensor, rotary: Rotary | None, heads: Heads, bias: torch.Tensor | None) -> None:
        self._rows, self._rotary, self._heads, self._bias = rows, rotary, heads, bias

    def take(self, part: Part, received: torch.Tensor) -> None:
        rows = rows_of(self._rows, part)
        packed = received.reshape(len(rows), self._heads[0].shape[1], -1)
        unpack(packed, self._bias, rows, self._heads, self._rotary)

    def give(self, part: Part) -> torch.Tensor:
        packed = pack(self._heads, rows_of(self._rows, part), self._rotary).flatten(0, 1)
        if self.sums:
            self.total = self.total + packed.sum(0, dtype=torch.float32)
        return packed.view(len(self._rows), -1, packed.shape[-1])


def rows_of(rows: torch.Tensor, part: Part) -> torch.Tensor:
    """The rows of the sequence that a part has, rank after rank. rows: [W, positions], or [W, TP ranks, positions]."""
    return rows[..., part.first : part.last].flatten()


def summed_copies(dy_blocks: torch.Tensor, copies: torch.Tensor, n: int) -> torch.Tensor:
    """dy [rows, N] from [W, rows, N'/W], column i of which belongs to row copies[i] of the weight, where several ranks need a KV
    head (AttentionHeads.sent_rows). Copies are added in fp32 and in the order of ranks."""
    total = dy_blocks.new_zeros(dy_blocks.shape[1], n, dtype=torch.float32)
    for block, columns in zip(dy_blocks, copies.chunk(len(dy_blocks)), strict=True):
        total[:, columns] += block  # within a block each column comes once
    return total.to(dy_blocks.dtype)


class LinearTurn(NamedTuple):
    """Whose turn a call is while methods are tried: of which run, for which linear, by which method."""

    run: Autotune
    name: str
    method: str


@dataclass(slots=True)  # made at each call: frozen it would take 0.6 microseconds more
class Linear:
    """One call of a Ulysses linear. weight: the parameter [N, K]. w: what is multiplied, the weight or, with `copies`, rows of it
    [N', K]. copies: int64 [N'], which row of the weight each row of w is. batch: rows of one position. turn: the call is timed as
    a whole, because parts, whose exchanges run beside each other's products, have no times of their own. ctx: see
    WeightGradient."""

    parts: tuple[Part, ...]
    weight: torch.Tensor
    w: torch.Tensor
    copies: torch.Tensor | None
    batch: int
    turn: LinearTurn | None = None
    ctx: Any = None

    @property
    def keeps(self) -> bool:
        """Whether what `to_rows` receives is kept for the weight gradient, and not sent again."""
        return self.parts[0].exchange.plan.wgrad is None

    @property
    def world_size(self) -> int:
        return self.parts[0].exchange.domain.world_size

    @property
    def rows_of_rank(self) -> int:
        """M/W, of all parts."""
        return self.parts[-1].last * self.batch

    def multiplying(self, w: torch.Tensor, ctx: Any) -> Self:
        """This call in a backward, whose second input was the weight. w: as autograd has kept it: hooks on saved tensors
        (checkpointing) give back another object."""
        return replace(self, w=w, ctx=ctx)

    def rows(self, x: torch.Tensor, part: Part) -> torch.Tensor:
        """Those of a part of a shard x [positions * batch, C]."""
        return x if len(self.parts) == 1 else x[part.first * self.batch : part.last * self.batch]

    def gradient(self) -> WeightGradient:
        first = self.parts[0]
        multiplies = first.over_tp or first.exchange
        return WeightGradient(self.weight, multiplies.plan.config.main_grad, len(self.parts), self.ctx)

    def to_heads(self, x: torch.Tensor, y: Rows) -> torch.Tensor:
        """y = all_to_all(x [M/W, K] @ w.T). Returns what the weight gradient needs of x: x."""
        with self._timed(self.turn, True) if self.turn else _UNTIMED:
            run_steps([self._leaving(part, part.forward, x, self.w.t(), y) for part in self.parts])
        return x

    def _leaving(
        self, part: Part, step: Callable[[Give, Read, Factor], Step], x: torch.Tensor, b_kn: torch.Tensor, y: Rows,
        meanwhile: Callable[[], None] | None = None,
    ) -> Step:  # fmt: skip
        """The GEMM + A2A of a part's rows of x. meanwhile: called before the step waits for the part's blocks."""

        def read(exchange: GemmAllToAll) -> None:
            if meanwhile is not None:
                meanwhile()
            y.take(part, exchange.received())

        return step(partial(self.rows, x, part), read, Factor(b_kn, y.place(part), part is self.parts[-1]))

    def heads_backward(
        self, x: torch.Tensor | None, dy: Rows, wants_dx: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(dx [M/W, K], dw). x: as `to_heads` returned it; None if dw is not wanted."""
        dx = self.w.new_empty(self.rows_of_rank, self.w.shape[1]) if wants_dx else None
        dw = self.gradient()

        def multiply(part: Part, receiver: AllToAllGemm) -> None:
            if dx is not None:
                receiver.matmul(self.w, self.rows(dx, part))
            if x is None:
                if dx is None:  # the peers need what this rank sends, whatever is frozen here
                    receiver.received_view()
                return
            blocks = receiver.received_view()
            if self.copies is not None:
                blocks = summed_copies(blocks, self.copies, self.weight.shape[0])
            self._add(dw, part, blocks, self.rows(x, part), part is not self.parts[-1])

        with self._timed(self.turn, False) if self.turn and wants_dx else _UNTIMED:
            run_steps([part.backward(partial(dy.give, part), partial(multiply, part)) for part in self.parts])
        return dx, None if x is None else dw.result()

    def to_rows(self, x: Rows, keep: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(y [M/W, N] = all_to_all(x) @ w.T, what each part has received [W, rows, K/W] if it is kept)."""
        y, kept = self.w.new_empty(self.rows_of_rank, self.w.shape[0]), []

        def multiply(part: Part, receiver: AllToAllGemm) -> None:
            receiver.matmul(self.w.t(), self.rows(y, part))
            if keep:
                kept.append(receiver.received_copy().unflatten(0, (self.world_size, -1)))

        with self._timed(self.turn, True) if self.turn else _UNTIMED:
            run_steps([part.forward(partial(x.give, part), partial(multiply, part)) for part in self.parts])
        return y, kept

    def rows_backward(
        self, x: Rows | list[torch.Tensor] | None, dy: torch.Tensor, dx: Rows | None
    ) -> torch.Tensor | None:
        """Write dx and return dw [N, K] of to_rows. x: the rows to send again, or what forward received and kept. What is not
        wanted is None."""
        dw = self.gradient()
        with self._timed(self.turn, False) if self.turn and dx is not None else _UNTIMED:
            if x is None or isinstance(x, list):
                self._send_dx(x, dy, dx, dw)
            else:
                for part in self.parts:
                    self._send_again(part, x, dy, dx, dw)
        return None if x is None else dw.result()

    def _send_again(self, part: Part, x: Rows, dy: torch.Tensor, dx: Rows | None, dw: WeightGradient) -> None:
        """dx of a part, and dw of the x that is sent again under its product."""
        domain, plan, tags = part.exchange.domain, part.exchange.plan, part.exchange.tags
        assert plan.wgrad is not None, "what forward has received was not kept"
        with part.exchange.backward[dx is not None, True]:
            receiver, dy_rows = plan.wgrad.start(domain, tags.wgrad, x.give(part)), self.rows(dy, part)
            if dx is None:
                self._add(dw, part, dy_rows, receiver.received_view(), False)
                return
            exchange = plan.dgrad.start(domain, tags.dgrad, dy_rows, self.w, dx.place(part))
            self._add(dw, part, dy_rows, receiver.received_view(), True)
            dx.take(part, exchange.received())

    def _send_dx(self, kept: list[torch.Tensor] | None, dy: torch.Tensor, dx: Rows | None, dw: WeightGradient) -> None:
        """dx of all parts, and dw by what forward received and kept, while dx is under way."""
        adds = [
            partial(self._add, dw, part, self.rows(dy, part), blocks, dx is not None)
            for part, blocks in zip(self.parts, kept or (), strict=kept is not None)
        ]
        if dx is None:
            for add in adds:
                add()
            return
        steps = [partial(part.backward, is_alone=kept is None) for part in self.parts]
        leaving = zip_longest(self.parts, steps, adds)
        run_steps([self._leaving(part, step, dy, self.w, dx, add) for part, step, add in leaving])

    def _add(self, dw: WeightGradient, part: Part, dy: torch.Tensor, x: torch.Tensor, leaves: bool) -> None:
        """Add a part's share to dw. leaves: a gradient of x is being sent meanwhile, by plan.dgrad."""
        beside = part.exchange.plan.dgrad if leaves else None
        with profiled(part.exchange.tags.ranges.wgrad), part.exchange.domain.span.products_beside(beside):
            dw.add(dy, x)

    def _timed(self, turn: LinearTurn, is_forward: bool) -> AbstractContextManager[None]:
        """Of a forward, or of a backward that gives an input gradient: else its time says nothing."""
        (run, name, method), work = turn, self.rows_of_rank * self.world_size * self.w.numel()  # of all parts
        kind = (run.fprop if is_forward else run.fprop.dgrad).kind
        return TimedScope(nullcontext(), run, name, kind, method, work)


class Terms(NamedTuple):
    """What the caller says about a call. meaning: in what else ranks must agree, in words, as part of the call's tags. on_plan:
    of parts it is told that of the first."""

    config: OverlapConfig | None
    name: str
    meaning: tuple[str, ...] = ()
    on_plan: OnPlan | None = None

    def also(self, meaning: str) -> Terms:
        """These terms, in which ranks must agree on one thing more."""
        return self._replace(meaning=(*self.meaning, meaning))

    def in_parts(self, positions: int) -> Terms:
        """Shards of other lengths may have equal parts, and more of them, which must not pair up."""
        return self.also(f"a part of {positions} positions a rank")


def heads_linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, heads: AttentionHeads | None,
    group: dist.ProcessGroup, terms: Terms,
) -> tuple[Linear, torch.Tensor | None]:  # fmt: skip
    """A call of linear_all_to_all as planned, and the bias of this rank's columns."""
    domain, copies, w_sent, bias_sent = domain_of(group, terms.config, x.device), None, w, bias
    if heads is not None:
        wrong = weight_error(heads, w, bias, domain.world_size, terms.name)
        if wrong is not None:
            refuse(wrong, LINEAR_ALL_TO_ALL, group, terms.config, x.device, terms.name)
        copies, terms = heads.sent_rows(domain.world_size, w.device), terms.also(str(heads))
    if copies is not None:
        # At each call: nothing tells when a weight has changed. Optimizers write into buffers that parameters are views of.
        w_sent = w.detach().index_select(0, copies).requires_grad_(w.requires_grad)
        bias_sent = None if bias is None else bias[copies]
    # For one row of all ranks' shards a rank receives W rows of N' / W features.
    row_bytes = w_sent.shape[:1].numel() * x.element_size()
    parts, turn = _parts(LINEAR_ALL_TO_ALL, x, w_sent, bias_sent, group, terms, 1, row_bytes)
    own_bias = None if bias_sent is None else bias_sent.chunk(domain.world_size)[domain.rank]
    return Linear(parts, w, w_sent.detach(), copies, rows_of_position(x), turn), own_bias


def rows_linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup, terms: Terms
) -> Linear:
    """A call of all_to_all_linear as planned."""
    world = domain_of(group, terms.config, x.device).world_size
    shards = world if x.dim() > 1 and x.shape[0] % world == 0 else 1  # plan_of refuses the rest
    # For one row of all ranks' shards a rank receives a row of K features.
    row_bytes = world * x.shape[-1:].numel() * x.element_size()
    parts, turn = _parts(ALL_TO_ALL_LINEAR, x, w, bias, group, terms, shards, row_bytes)
    return Linear(parts, w, w.detach(), None, rows_of_position(x), turn)


def _parts(
    spec: OperatorSpec, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup,
    terms: Terms, shards: int, row_bytes: int,
) -> tuple[tuple[Part, ...], LinearTurn | None]:  # fmt: skip
    """The parts of x [shards * positions, ..., C] with the plan of each, and whose turn it is. row_bytes: see cut_exchange."""
    config, name = terms.config, terms.name
    settings = config or domain_of(group, None, x.device).config

    def plan(x: torch.Tensor, config: OverlapConfig | None, tries: bool = False) -> Planned:
        return plan_of(spec, x, w, bias, group, config, name, tries=tries)

    positions, batch = x.shape[:1].numel() // shards, x.shape[1:-1].numel()
    if x.dim() < 2 or not row_bytes or not positions or not batch:
        plan(x, config)  # which raises, on every rank: there is nothing to cut
    places = cut_exchange(positions, batch, row_bytes, settings)
    if len(places) > 1:
        terms = terms.in_parts(positions)
    # Of a part as many rows as it has: any will do.
    operands = [x[: (last - first) * shards] if len(places) > 1 else x for first, last in places]
    turn = run = None
    if settings.tune_steps:
        planned = plan(operands[0], config, tries=True)
        run, method = planned.next_run, planned.next_method(name)
        if planned.run is not None and method is not None:
            turn, config = LinearTurn(planned.run, name, method), settings.by(method)
    parts = tuple(
        Part(*place, plan(operand, config).linear(name, terms.meaning))
        for place, operand in zip(places, operands, strict=True)
    )
    if terms.on_plan is not None:
        terms.on_plan(parts[0].exchange.plan, run)
    return parts, turn


def weight_error(
    heads: AttentionHeads, w: torch.Tensor, bias: torch.Tensor | None, world_size: int, name: str
) -> str | None:
    """Why `heads` do not fit w, bias or the ranks, or None."""
    wrong = heads.error(world_size, name)
    if wrong is not None:
        return wrong
    if w.shape[:1] != (heads.features,):
        rows = f"{w.shape[:1].numel()} rows (shape {tuple(w.shape)})"
        return f"{name}: w has {rows}, {heads} needs {heads.features}; they must be equal"
    if bias is not None and bias.shape != (heads.features,):
        return f"{name}: bias has shape {tuple(bias.shape)}; it must be [{heads.features}], one per row of w"
    return None


def rows_of_position(x: torch.Tensor) -> int:
    """Rows of one position of x [positions, ..., C]."""
    return 1 if x.dim() == 2 else max(1, x.shape[1:-1].numel())


def like(x: torch.Tensor, positions: int, features: int) -> torch.Tensor:
    """A tensor [positions, b, features] for plans, in kind as x [*, b, *], that takes the memory of one element."""
    one = x.new_empty(1, 1, 1).expand(positions, x.shape[1], features)
    return one.requires_grad_() if x.requires_grad and torch.is_grad_enabled() else one
