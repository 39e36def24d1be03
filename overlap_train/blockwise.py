"""The passes of column and row linears in fp8 with a scale for each block (ops/blocks.py); fp8.py has those with one scale.

    y = x @ w.T         x: pieces along K        w: squares
    dx = dy @ w         dy: pieces along N       w: squares, transposed
    dw = dy.T @ x       dy, x: pieces along M

All is e4m3, and sums are in fp32. Scales lie behind the numbers that they are for, in packed rows, so that ranks tell each other
nothing first. x and dy are rounded twice, by rows and by columns. A column linear sends x by rows in forward and by columns in
backward. A row linear sends dy by rows and by columns side by side: one copy, one slot.
"""

from __future__ import annotations

from typing import Any

import torch

from .fp8 import copies_of
from .group.domain import profiled
from .ops.blocks import Pieces, columns_of, new_columns, new_packed, new_rows, squares, write_pieces
from .ops.plan import EnginePlan
from .ops.planned import PlannedOp
from .ops.product import BlockMatrix
from .ops.quantize import Quantized
from .ops.wgrad import WeightGradient
from .select.method import packed_bytes


def _weight(linear: PlannedOp, w: torch.Tensor, rows: bool, columns: bool) -> Quantized:
    """w [N, K] by rows for forward, by columns for backward; both, where its copies stay for later."""
    copies = copies_of(linear, w)
    if copies is None:
        return squares(linear.domain, w, rows, columns and not rows)
    if rows and linear.turn is not None:  # methods are compared by calls that do the same
        copies.clear()
    return copies.of(linear.domain, w, columns, squares)


def _by_rows(linear: PlannedOp, w: torch.Tensor, wants_dx: bool, x_inverse: torch.Tensor | None = None) -> BlockMatrix:
    w8 = _weight(linear, w, True, wants_dx)
    assert w8.rows is not None
    return BlockMatrix(w8.rows, w8.inverse, linear.plan.dtype, x_inverse)


def _by_columns(linear: PlannedOp, w: torch.Tensor, dy_inverse: torch.Tensor | None = None) -> BlockMatrix:
    w8 = _weight(linear, w, False, True)
    assert w8.columns is not None and w8.inverse_of_columns is not None
    return BlockMatrix(w8.columns, w8.inverse_of_columns, linear.plan.dtype, dy_inverse)


def _new_rows(linear: PlannedOp, scatter: EnginePlan, x: torch.Tensor) -> Pieces:
    """Room for x [M, K] as a scatter multiplies it, which sends nothing of it."""
    return new_rows(x, linear.domain.world_size if scatter.method == "chunked" else 1)


def _side_by_side(linear: PlannedOp, x: torch.Tensor) -> torch.Tensor:
    """x [M/W, K] in packed rows and, behind them, packed columns."""
    both, width = new_packed(x, twice=True), packed_bytes(x.shape[1])
    write_pieces(linear.domain, x, both[:, :width], both[:, width:])
    return both


def _add(linear: PlannedOp, dw: WeightGradient, dy: Pieces, x: Pieces) -> None:
    with profiled(linear.tags.ranges.wgrad):
        dw.add_scaled(dy.numbers, BlockMatrix(x.numbers, x.inverse, linear.plan.dtype, dy.inverse, in_pieces=True))


def column_forward(
    linear: PlannedOp, x_shard_m: torch.Tensor, w_shard_n: torch.Tensor, bias: torch.Tensor | None,
    wants_dx: bool, trains: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:  # fmt: skip
    """(y_shard_n [M, N/W], what backward wants: x by columns of all ranks, if that is kept; else, if the weight `trains`, this
    rank's, packed, and None)."""
    domain, plan, width = linear.domain, linear.plan, packed_bytes(x_shard_m.shape[1])
    bias = bias if bias is None else bias.contiguous()  # the library reads it so
    saved: tuple[torch.Tensor | None, ...] = (None, None)
    with linear.forward:
        if linear.keeps:
            sent = _side_by_side(linear, x_shard_m)
        else:
            sent, columns = new_packed(x_shard_m), new_packed(x_shard_m) if trains else None
            write_pieces(domain, x_shard_m, sent, columns)
            saved = (columns, None)
        gather = plan.fprop.start(domain, linear.tags.fprop, sent)
        y_shard_n = gather.matmul(_by_rows(linear, w_shard_n, wants_dx), bias)
        if linear.keeps:
            saved = columns_of(domain, gather.gathered_view()[:, width:], x_shard_m.shape[1])
        return y_shard_n, saved


def column_backward(
    linear: PlannedOp, dy_shard_n: torch.Tensor, saved: tuple[Any, ...], w_shard_n: torch.Tensor,
    dw: WeightGradient | None, wants_dx: bool,
) -> torch.Tensor | None:  # fmt: skip
    """dx_shard_m [M/W, K], or None. saved: by column_forward. dw: gets the weight gradient; None: it is not wanted."""
    domain, plan, tags = linear.domain, linear.plan, linear.tags
    dx_shard_m = scatter = gather = None
    with linear.backward[wants_dx, dw is not None]:
        if dw is not None and plan.wgrad is not None:
            gather = plan.wgrad.start(domain, tags.wgrad, saved[0])
        dgrad = plan.dgrad_alone if dw is None or dw.is_delayed else plan.dgrad
        dy = _new_rows(linear, dgrad, dy_shard_n) if wants_dx else None
        dy_columns = None if dw is None else new_columns(dy_shard_n)
        write_pieces(domain, dy_shard_n, dy, dy_columns)
        if dy is not None:
            scatter = dgrad.start(domain, tags.dgrad, dy.numbers, _by_columns(linear, w_shard_n, dy.inverse))
            if gather is not None:
                gather.keep_own(dgrad)
        if dw is not None and dy_columns is not None:
            k = w_shard_n.shape[1]
            x = Pieces(*saved) if gather is None else columns_of(domain, gather.gathered_view(), k)
            _add(linear, dw, dy_columns, x)
        if scatter is not None:
            dx_shard_m = scatter.finish()
    return dx_shard_m


def row_forward(
    linear: PlannedOp, x_shard_k: torch.Tensor, w_shard_k: torch.Tensor, bias: torch.Tensor | None,
    wants_dx: bool, trains: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:  # fmt: skip
    """(y_shard_m [M/W, N], what backward wants: x by columns, if the weight `trains`)."""
    domain, plan = linear.domain, linear.plan
    bias = bias if bias is None else bias.contiguous()  # kernels read it so
    with linear.forward:
        x, columns = _new_rows(linear, plan.fprop, x_shard_k), new_columns(x_shard_k) if trains else None
        write_pieces(domain, x_shard_k, x, columns)
        right = _by_rows(linear, w_shard_k, wants_dx, x.inverse)
        y_shard_m = plan.fprop.start(domain, linear.tags.fprop, x.numbers, right, bias).finish()
        return y_shard_m, columns or (None, None)


def row_backward(
    linear: PlannedOp, dy_shard_m: torch.Tensor, saved: tuple[Any, ...], w_shard_k: torch.Tensor,
    dw: WeightGradient | None, wants_dx: bool,
) -> torch.Tensor | None:  # fmt: skip
    """dx_shard_k [M, K/W], or None. saved: by row_forward. dw: gets the weight gradient; None: it is not wanted."""
    domain, plan, n, dx_shard_k = linear.domain, linear.plan, dy_shard_m.shape[1], None
    with linear.backward[True, dw is not None]:  # the peers want dy_shard_m, whatever this rank does
        if dw is not None:
            sent = _side_by_side(linear, dy_shard_m)
        else:
            write_pieces(domain, dy_shard_m, sent := new_packed(dy_shard_m), None)
        gather = plan.dgrad.start(domain, linear.tags.dgrad, sent)
        if wants_dx:
            dx_shard_k = gather.matmul(_by_columns(linear, w_shard_k))
            if dw is not None:
                gather.keep_own(plan.dgrad)
        if dw is not None:
            dy = columns_of(domain, gather.gathered_view()[:, packed_bytes(n) :], n)
            _add(linear, dw, dy, Pieces(*saved))
    return dx_shard_k
