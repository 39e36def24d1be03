"""The passes of column and row linears in fp8 with one scale a tensor; linear.py has those of other dtypes, and the autograd
functions of all; blockwise.py those with a scale for each block.

    y = x8 @ w8.T * x_inverse * w_inverse           e4m3 by e4m3
    dx = dy8 @ w8 * dy_inverse * w_inverse          e5m2 (or e4m3) by e4m3
    dw = dy8.T @ x8 * dy_inverse * x_inverse        e5m2 (or e4m3) by e4m3

What is gathered has one byte an element, and one scale for the shards of all ranks: the largest element of any of them decides;
or all scales are given (GivenScales). Partial sums stay in the dtype of the input, as do results. Tensor cores want
both operands along the contraction. So backward multiplies transposed copies: of the weight, of its own gradient, and of what it
has gathered.
"""

from __future__ import annotations

from typing import Any

import torch

from .group.domain import OverlapDomain, profiled
from .ops.planned import PlannedOp
from .ops.product import Fp8Matrix
from .ops.quantize import (
    FORWARD,
    GRADIENT,
    Fp8Copies,
    Given,
    GivenScales,
    Quantized,
    largest,
    quantized,
    transposed,
)
from .ops.wgrad import WeightGradient


def copies_of(linear: PlannedOp, w: torch.Tensor) -> Fp8Copies | None:
    """What calls keep of a weight. Replays of a CUDA graph would never see the next one."""
    copies: Fp8Copies | None = getattr(w, "fp8_copies", None)
    if copies is None or not linear.domain.is_capturing():
        return copies
    return None if copies.inverse is None else Fp8Copies(copies.inverse)


def _given(linear: PlannedOp, w: torch.Tensor) -> GivenScales | None:
    """The scales that are given for a linear; None: they are found in each call."""
    return w.fp8_scales if linear.plan.amax is None else None  # type: ignore[attr-defined,no-any-return]


def _by_given_scale(domain: OverlapDomain, w: torch.Tensor, rows: bool, columns: bool) -> Quantized:
    scales: GivenScales = w.fp8_scales  # type: ignore[attr-defined]
    return quantized(domain, w, scales.w, FORWARD, rows, columns)


def _largest_of_all(linear: PlannedOp, x: torch.Tensor) -> torch.Tensor:
    return linear.of_all_ranks(largest(linear.domain, x))


def forward_weight(linear: PlannedOp, w: torch.Tensor, wants_dx: bool) -> tuple[Quantized, torch.Tensor | None]:
    """(w by rows, its largest elements for backward, or the given scale). None: backward finds columns among the copies."""
    copies, given = copies_of(linear, w), _given(linear, w)
    if copies is None:
        kept = largest(linear.domain, w) if given is None else given.w.scale.clone()  # its owner changes it
        return quantized(linear.domain, w, kept if given is None else given.w, FORWARD), kept
    if linear.turn is not None:  # methods are compared by calls that do the same
        copies.clear()
    return copies.of(linear.domain, w, wants_dx, None if given is None else _by_given_scale), None


def backward_weight(linear: PlannedOp, w: torch.Tensor, kept: torch.Tensor | None) -> Quantized:
    """w by columns. kept: by forward_weight."""
    copies, given = copies_of(linear, w) if kept is None else None, _given(linear, w)
    if copies is not None:
        return copies.of(linear.domain, w, True, None if given is None else _by_given_scale)
    if kept is None:
        kept = largest(linear.domain, w) if given is None else given.w.scale
    return quantized(linear.domain, w, kept if given is None else Given(kept, None), FORWARD, rows=False, columns=True)


def column_forward(
    linear: PlannedOp, x_shard_m: torch.Tensor, w_shard_n: torch.Tensor, bias: torch.Tensor | None,
    wants_dx: bool, trains: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:  # fmt: skip
    """(y_shard_n [M, N/W], what backward wants: x8 [M, K] if it is kept, else the shard, if the weight `trains`; its inverse; the
    largest of w)."""
    domain, plan, tags = linear.domain, linear.plan, linear.tags
    bias = bias if bias is None else bias.contiguous()  # kernels read it so
    with linear.forward:
        given = _given(linear, w_shard_n)
        x8 = quantized(domain, x_shard_m, given.x if given else _largest_of_all(linear, x_shard_m), FORWARD)
        gather = plan.fprop.start(domain, tags.fprop, x8.rows)
        w8, w_amax = forward_weight(linear, w_shard_n, wants_dx)  # under the gather
        y_shard_n = gather.matmul(Fp8Matrix(w8.rows, x8.inverse, w8.inverse, plan.dtype, fast=True), bias)
        rows = gather.gathered_copy() if linear.keeps else x8.rows
        return y_shard_n, (rows if trains else None, x8.inverse, w_amax)


def column_backward(
    linear: PlannedOp, dy_shard_n: torch.Tensor, saved: tuple[Any, ...], w_shard_n: torch.Tensor,
    dw: WeightGradient | None, wants_dx: bool,
) -> torch.Tensor | None:  # fmt: skip
    """dx_shard_m [M/W, K], or None. saved: by column_forward. dw: gets the weight gradient; None: it is not wanted."""
    domain, plan, tags, (x8, x_inverse, w_amax) = linear.domain, linear.plan, linear.tags, saved
    dx_shard_m = scatter = gather = None
    gradient = GRADIENT[plan.config.fp8]
    with linear.backward[wants_dx, dw is not None]:
        if dw is not None and plan.wgrad is not None:
            gather = plan.wgrad.start(domain, tags.wgrad, x8)
        given = _given(linear, w_shard_n)
        by = given.dy if given else largest(domain, dy_shard_n)
        dy8 = quantized(domain, dy_shard_n, by, gradient, wants_dx, dw is not None)
        if wants_dx:
            dgrad = plan.dgrad_alone if dw is None or dw.is_delayed else plan.dgrad
            w8 = backward_weight(linear, w_shard_n, w_amax)
            scatter = dgrad.start(
                domain, tags.dgrad, dy8.rows, Fp8Matrix(w8.columns, dy8.inverse, w8.inverse, plan.dtype)
            )
            if gather is not None:
                gather.keep_own(dgrad)
        if dw is not None:
            x8 = transposed(domain, x8 if gather is None else gather.gathered_view())
            with profiled(tags.ranges.wgrad):
                dw.add_scaled(dy8.columns, Fp8Matrix(x8, dy8.inverse, x_inverse, plan.dtype))
        if scatter is not None:
            dx_shard_m = scatter.finish()
    return dx_shard_m


def row_forward(
    linear: PlannedOp, x_shard_k: torch.Tensor, w_shard_k: torch.Tensor, bias: torch.Tensor | None,
    wants_dx: bool, trains: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:  # fmt: skip
    """(y_shard_m [M/W, N], what backward wants: x8 [K/W, M], if the weight `trains`; its inverse; the largest of w)."""
    domain, plan = linear.domain, linear.plan
    bias = bias if bias is None else bias.contiguous()  # kernels read it so
    with linear.forward:
        given = _given(linear, w_shard_k)
        x8 = quantized(domain, x_shard_k, given.x if given else largest(domain, x_shard_k), FORWARD, columns=trains)
        w8, w_amax = forward_weight(linear, w_shard_k, wants_dx)
        right = Fp8Matrix(w8.rows, x8.inverse, w8.inverse, plan.dtype, fast=True)
        y_shard_m = plan.fprop.start(domain, linear.tags.fprop, x8.rows, right, bias).finish()
        return y_shard_m, (x8.columns, x8.inverse, w_amax)


def row_backward(
    linear: PlannedOp, dy_shard_m: torch.Tensor, saved: tuple[Any, ...], w_shard_k: torch.Tensor,
    dw: WeightGradient | None, wants_dx: bool,
) -> torch.Tensor | None:  # fmt: skip
    """dx_shard_k [M, K/W], or None. saved: by row_forward. dw: gets the weight gradient; None: it is not wanted."""
    domain, plan, tags, dx_shard_k, (x8, x_inverse, w_amax) = linear.domain, linear.plan, linear.tags, None, saved
    gradient = GRADIENT[plan.config.fp8]
    with linear.backward[True, dw is not None]:  # the peers want dy_shard_m, whatever this rank does
        given = _given(linear, w_shard_k)
        dy8 = quantized(domain, dy_shard_m, given.dy if given else _largest_of_all(linear, dy_shard_m), gradient)
        gather = plan.dgrad.start(domain, tags.dgrad, dy8.rows)
        if wants_dx:
            w8 = backward_weight(linear, w_shard_k, w_amax)
            dx_shard_k = gather.matmul(Fp8Matrix(w8.columns, dy8.inverse, w8.inverse, plan.dtype))
            if dw is not None:
                gather.keep_own(plan.dgrad)
        if dw is not None:
            with profiled(tags.ranges.wgrad):
                dw.add_scaled(
                    transposed(domain, gather.gathered_view()), Fp8Matrix(x8, dy8.inverse, x_inverse, plan.dtype)
                )
    return dx_shard_k
