"""The public operators of experts, whose ranks exchange rows as a router says, and their autograd functions.

    expert_routing      who sends how many rows to whom, in one call of both operators
    dispatch_linear     forward  A2A + grouped GEMM    backward  grouped GEMM + A2A for dx; dw under the end of the A2A
    linear_combine      forward  grouped GEMM + A2A    backward  A2A + grouped GEMM for da; dw with the rows just received

W ranks; E experts, rank r has those from r E/W on; T tokens of this rank, R rows of all ranks for this rank's experts, by expert,
then source rank (this rank, rank-1, ...), then token (ops/routing.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from .config import OverlapConfig
from .group.domain import profiled
from .group.registry import domain_of
from .linear import applied, as_a_whole, once_differentiable
from .ops.blocks import packed_rows, unpacked_rows
from .ops.experts import ExpertCall, routing_op
from .ops.grouped import BlockProduct, GroupedProduct
from .ops.grouped_wgrad import grouped_gradients
from .ops.plan_cache import OnPlan
from .ops.planned import PlannedOp
from .ops.routing import Routing
from .ops.spec import DISPATCH_LINEAR, LINEAR_COMBINE, tensor_error
from .ops.wgrad import WeightGradient

Weights: TypeAlias = torch.Tensor | Sequence[torch.Tensor]


@as_a_whole
def expert_routing(
    experts: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    config: OverlapConfig | None = None,
    name: str = "expert_routing",
) -> Routing:
    """The routing of one forward pass through the experts, for `dispatch_linear` and `linear_combine`. Ranks exchange how many
    rows they have for each expert. `dispatch_linear` lets the host wait for that, since it decides how much memory the rows take.

    Args:
        experts: bool [T, E], which experts each token of this rank goes to. T may differ between ranks. Do not write to it before
            the first operator has run: where tokens have more than eight experts in the mean, they are looked up again.
        group: the expert-parallel group; all its ranks make the same calls in the same order.
        config, name: see all_gather_linear.

    Raises:
        ValueError: experts is something else, or E cannot be divided by W; on all ranks at a first call.
        OverlapTimeoutError, OverlapMismatchError: a rank did not come, or is in another call. On GPUs the first operator raises
            these, or what first reads a number of rows.
        RuntimeError: a CUDA graph is being captured.
    """
    if (strange := tensor_error(name, {"experts": experts})) is not None:
        raise ValueError(strange)
    domain = domain_of(group, config, experts.device)
    if domain.is_capturing():
        raise RuntimeError(
            f"{name}: a CUDA graph is being captured, and the host has to wait for how many rows there are; leave experts out"
        )
    op = routing_op(experts, domain, config, name)
    with op.forward, torch.no_grad():
        counts = experts.sum(0, dtype=torch.int32)
        of_ranks = op.plan.fprop.start(domain, op.tags.fprop, counts.view(1, -1)).gathered_copy()
        return Routing(experts, of_ranks, domain)


@as_a_whole
def dispatch_linear(
    x: torch.Tensor,
    w: Weights,
    routing: Routing,
    probs: torch.Tensor | None = None,
    *,
    config: OverlapConfig | None = None,
    name: str = "dispatch_linear",
    on_plan: OnPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The first linear of experts on tokens of all ranks.

        x      [T, K]       tokens of this rank
        w      [E/W, N, K]  weights of this rank's experts, whose gradient autograd gets; or a list of E/W weights [N, K]
        probs  [T, E]       what the router gives each token and expert; travels with the rows
        y      [R, N]     = (all rows for this rank's experts) @ w[their expert].T
        p      [R]          the probs of these rows, in the dtype of probs; None without probs
        dx     [T, K]     = the sum of each token's rows of dy @ w[their expert], in order of expert
        dw     [N, K]     = dy.T @ rows, of each expert's rows

    Args:
        routing: of this forward pass, the same in `linear_combine`.
        config, name, on_plan: see all_gather_linear. Methods are fused (Hopper; 16 bits, N and K multiples of 8, up to 8 ranks),
            chunked and collective; others, and what fused does not serve, run as chunked. What slots do not hold
            (config.experts_room) runs as collective on all ranks. fp8 is "off" or "blockwise": rows travel in one byte an
            element, weights have multiples of 128 features, x is no float16, and weight gradients are products in its dtype.

    Returns:
        (y, p). Where each weight of a list has `main_grad`, backward adds its dw there (config.main_grad).

    Raises:
        as all_gather_linear.
    """
    weights = _each(w, name)
    call = ExpertCall(DISPATCH_LINEAR, x, weights, probs, routing, config, name, on_plan)
    y, of_rows = _apply_dispatch(x, *weights, probs, call, routing)
    return y, of_rows


@as_a_whole
def linear_combine(
    a: torch.Tensor,
    w: Weights,
    routing: Routing,
    *,
    config: OverlapConfig | None = None,
    name: str = "linear_combine",
    on_plan: OnPlan | None = None,
) -> torch.Tensor:
    """The last linear of experts, whose rows go back to their tokens.

        a      [R, K]       rows of this rank's experts, as dispatch_linear returned them
        w      [E/W, N, K]  weights of this rank's experts; or a list of E/W weights [N, K]
        z      [T, N]     = the sum of each token's rows of a @ w[their expert].T
        da     [R, K]     = (rows of dz of all ranks) @ w[their expert]
        dw     [N, K]     = (rows of dz).T @ a, of each expert's rows

    Each row is rounded to the dtype of a, and sent. The sum is in order of expert, in fp32, and rounded once: every run gives the
    same bits. A token without experts gets 0.

    Arguments, errors: see dispatch_linear.
    """
    weights = _each(w, name)
    call = ExpertCall(LINEAR_COMBINE, a, weights, None, routing, config, name, on_plan)
    z: torch.Tensor = _apply_combine(a, *weights, call, routing)
    return z


def _each(w: Weights, name: str) -> Sequence[torch.Tensor]:
    """The weights of the experts, one by one."""
    if isinstance(w, torch.Tensor):
        return w.unbind(0) if w.dim() else ()
    weights = [*w] if isinstance(w, Iterable) else [w]
    for number, weight in enumerate(weights):
        if not isinstance(weight, torch.Tensor):
            what = f"w[{number}]" if isinstance(w, Iterable) else "w"
            raise ValueError(
                f"{name}: {what} is a {type(weight).__name__}; w must be a tensor [E/W, N, K] or a list of E/W weights [N, K]"
            )
    return weights


class _DispatchLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        *weights, probs, call, routing = others
        numbers = None if probs is None else probs.float().contiguous()
        op = call.op()  # the GPU stands still from here until its first kernel
        with op.forward:
            gather = op.plan.fprop.start(op.domain, op.tags.fprop, routing, _left(op, x), numbers, op.keeps)
            y = gather.matmul(_product(op, weights, True, weights[0]))
        ctx.op, ctx.routing, ctx.weights = op, routing, weights  # weights: for what they carry, as in linear.py
        ctx.of_probs = None if probs is None else (probs.shape, probs.dtype)
        ctx.save_for_backward(gather.rows if op.keeps else None, *weights)
        return y, None if probs is None else gather.numbers.to(probs.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, of_rows: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        op, routing, (rows, *weights) = ctx.op, ctx.routing, ctx.saved_tensors
        wants_dx, *wants_dws = ctx.needs_input_grad[: 1 + len(weights)]
        wants_dprobs = ctx.needs_input_grad[1 + len(weights)]
        dy, dx, dprobs, combine = dy.contiguous(), None, None, None
        numbers = of_rows.float().contiguous() if wants_dprobs and of_rows is not None else None
        with op.backward[wants_dx or wants_dprobs, any(wants_dws)]:
            if wants_dx or wants_dprobs:
                product = _product(op, weights, False, ctx.weights[0])
                combine = op.plan.dgrad.start(op.domain, op.tags.dgrad, routing, _left(op, dy), product, numbers)
            dws = _weight_gradients(ctx, op, dy, _values(op, rows, weights[0].shape[1], dy.dtype))
            if combine is not None:
                dx = combine.finish()
        if numbers is not None and combine is not None:
            shape, dtype = ctx.of_probs
            dprobs = dy.new_zeros(shape, dtype=dtype)
            dprobs.view(-1)[routing.places_of_tokens] = combine.numbers.to(dtype)
        return dx if wants_dx else None, *dws, dprobs, None, None


class _LinearCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, *others: Any) -> torch.Tensor:
        *weights, call, routing = others
        a, op = a.contiguous(), call.op()
        with op.forward:
            product = _product(op, weights, True, weights[0])
            z: torch.Tensor = op.plan.fprop.start(op.domain, op.tags.fprop, routing, _left(op, a), product).finish()
        ctx.op, ctx.routing, ctx.weights = op, routing, weights
        ctx.save_for_backward(a if op.keeps else None, *weights)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        op, routing, (a, *weights) = ctx.op, ctx.routing, ctx.saved_tensors
        wants_da, *wants_dws = ctx.needs_input_grad[: 1 + len(weights)]
        with op.backward[True, any(wants_dws)]:  # the peers want dz, whatever this rank does
            sent = _left(op, dz.contiguous())
            gather = op.plan.dgrad.start(op.domain, op.tags.dgrad, routing, sent, None, any(wants_dws))
            da = gather.matmul(_product(op, weights, False, ctx.weights[0]), wants_da)
            dws = _weight_gradients(ctx, op, _values(op, gather.rows, weights[0].shape[0], dz.dtype), a)
        return da, *dws, None, None


def _product(
    op: PlannedOp, weights: Sequence[torch.Tensor], transposed: bool, first: torch.Tensor
) -> GroupedProduct | BlockProduct:
    """first: weights[0] as the caller has it."""
    if op.plan.config.fp8 == "off":
        return GroupedProduct(weights, transposed, first)
    return BlockProduct(op.domain, weights, transposed, first)


def _left(op: PlannedOp, rows: torch.Tensor) -> torch.Tensor:
    """The left operand of a product, as it is sent or multiplied."""
    return rows if op.plan.config.fp8 == "off" else packed_rows(op.domain, rows)


def _values(op: PlannedOp, rows: torch.Tensor | None, features: int, dtype: torch.dtype) -> torch.Tensor | None:
    """What rows that have arrived stand for."""
    if rows is None or op.plan.config.fp8 == "off":
        return rows
    return unpacked_rows(op.domain, rows, features, dtype)


def _weight_gradients(
    ctx: Any, op: PlannedOp, dy: torch.Tensor | None, x: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """dy.T @ x of each expert's rows, both in placed order; None where it is not wanted, or in main_grad."""
    if x is None or dy is None:
        return [None] * len(ctx.weights)
    places, main_grad = ctx.routing.all_places, op.plan.config.main_grad
    # torch makes the list anew each time: 1 ms for 64 experts
    edges = SimpleNamespace(next_functions=ctx.next_functions)
    wanted = ctx.needs_input_grad[1 : 1 + len(ctx.weights)]
    with profiled(op.tags.ranges.wgrad):
        # The kernel makes all: where one is frozen its product would be for nobody.
        dws = grouped_gradients(op.domain, ctx.weights, main_grad, edges, dy, x, places) if all(wanted) else None
        if dws is not None:
            return dws
        # All are made, and so checked, before one is added.
        gradients = [
            WeightGradient(weight, main_grad, ctx=edges, number=number) if is_wanted else None
            for number, (weight, is_wanted) in enumerate(zip(ctx.weights, wanted, strict=True), 1)
        ]
        for gradient, first, count in zip(gradients, places.starts, places.counts, strict=True):
            if gradient is not None:
                gradient.add(dy[first : first + count], x[first : first + count])
        placeholder = cache(lambda: torch.empty_like(ctx.weights[0]))
        return [None if gradient is None else gradient.result(placeholder) for gradient in gradients]


_apply_dispatch, _apply_combine = applied(_DispatchLinear), applied(_LinearCombine)
