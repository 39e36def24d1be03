"""The public operators of tensor and sequence parallelism, and their autograd functions (Ulysses' are in `ulysses/`).

    all_gather_linear (column)      forward  AG(x) + GEMM    backward  GEMM + RS for dx, beside AG(x) for dw, whose GEMM runs
                                                                       under the end of the RS
    linear_reduce_scatter (row)     forward  GEMM + RS       backward  AG(dy) + GEMM for dx; dw with the dy just gathered

The passes are here, those in fp8 in fp8.py; parts of a long sequence under Ulysses call them one by one, too
(ulysses/two_groups.py). ops/spec.py has a row for each operator, ops/plan.py what a plan decides.

W ranks; M global rows (the product of all leading dimensions, the first of which is sharded); K input and N output features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable as refusing

from .config import OverlapConfig
from .group.domain import is_profiling, profiled
from .ops.plan_cache import OnPlan, op_of
from .ops.planned import PlannedOp
from .ops.spec import ALL_GATHER_LINEAR, LINEAR_REDUCE_SCATTER, PLAIN, PLAIN_OR_NONE, OperatorSpec, local_operands
from .ops.wgrad import WeightGradient

Operator = TypeVar("Operator", bound=Callable[..., Any])


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`. Its half in Python looks for torch.func's wrappers in every argument, which takes 2.4 of 7 microseconds.
    Inside of torch.func's transforms calls are refused (plan_cache.py); outside of them its half in C++ does the work. Without
    gradients only forward runs, which saves all 7."""
    in_c: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(*arguments: Any) -> Any:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:  # autograd refuses tangents
            return in_c(*arguments)
        return function.forward(_NoGradients(), *arguments)

    return apply


class _NoGradients:
    """The ctx of a forward pass that has no backward. needs_input_grad: of its input and its weight; it asks for no others."""

    needs_input_grad = (False, False)

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...


def _unseen() -> AbstractContextManager[Any]:
    """Bracket of an operator under selective activation checkpointing, which recomputes it as a whole. By the names of operations
    it would save products that lie in memory of ours, and which are overwritten by then; and what only a first call does."""
    from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    selective = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)
    saves = any(isinstance(mode, selective) for mode in _get_current_dispatch_mode_stack())
    return _disable_current_modes() if saves else nullcontext()


def as_a_whole(operator: Operator) -> Operator:
    """The operator as torch.compile, whose graph breaks there, and selective activation checkpointing take it: as a whole."""

    @functools.wraps(operator)
    def call(*operands: Any, **settings: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return run_eagerly(call, *operands, **settings)
        if torch._C._len_torch_dispatch_stack():
            with _unseen():
                return operator(*operands, **settings)
        return operator(*operands, **settings)

    return cast(Operator, call)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator for a backward that cannot be differentiated. It switches gradients off and on again, 2.5 microseconds:
    here only where they are on (create_graph=True). Compiled autograd traces a backward: it gets this one as a whole. Autocast
    around `backward()` changes nothing: products have the dtype of forward's."""
    refused = refusing(backward)

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        run = refused if torch.is_grad_enabled() else backward
        if torch.compiler.is_dynamo_compiling():
            return run_eagerly(run, ctx, *gradients)
        if torch._C._is_any_autocast_enabled():
            with torch.autocast(gradients[0].device.type, enabled=False):
                return run(ctx, *gradients)
        return run(ctx, *gradients)

    return once


def column_forward(
    linear: PlannedOp, x_shard_m: torch.Tensor, w_shard_n: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y_shard_n [M, N/W] = all_gather(x_shard_m) @ w_shard_n.T + bias, x for backward: [M, K] if kept, else the shard)."""
    bias = bias if bias is None else bias.contiguous()  # kernels read it so
    with linear.forward:
        gather = linear.plan.fprop.start(linear.domain, linear.tags.fprop, x_shard_m)
        y_shard_n = gather.matmul(w_shard_n.t(), bias)
        return y_shard_n, gather.gathered_copy() if linear.keeps else x_shard_m


def column_backward(
    linear: PlannedOp, dy_shard_n: torch.Tensor, x: torch.Tensor | None, w_shard_n: torch.Tensor,
    dw: WeightGradient | None, wants_dx: bool,
) -> torch.Tensor | None:  # fmt: skip
    """dx_shard_m [M/W, K] = reduce_scatter(dy_shard_n @ w_shard_n), or None.

    x: as column_forward returned it. dw: gets dy_shard_n.T @ all_gather(x); None: it is not wanted, and x neither.
    """
    domain, plan, tags = linear.domain, linear.plan, linear.tags
    dx_shard_m = scatter = gather = None
    wgrad = None if dw is None else plan.wgrad
    with linear.backward[wants_dx, dw is not None]:
        if wgrad is not None:
            assert x is not None
            gather = wgrad.start(domain, tags.wgrad, x)
        if wants_dx:
            dgrad = plan.dgrad_alone if dw is None or dw.is_delayed else plan.dgrad
            scatter = dgrad.start(domain, tags.dgrad, dy_shard_n, w_shard_n)
            if gather is not None:
                gather.keep_own(dgrad)
        if dw is not None:
            gathered = x if gather is None else gather.gathered(dw.is_delayed)
            assert gathered is not None
            if is_profiling() or (scatter is not None and plan.dgrad.sm_margin):
                with profiled(tags.ranges.wgrad), domain.span.products_beside(None if scatter is None else plan.dgrad):
                    dw.add(dy_shard_n, gathered)
            else:
                dw.add(dy_shard_n, gathered)
        if scatter is not None:
            dx_shard_m = scatter.finish()
    return dx_shard_m


def row_forward(
    linear: PlannedOp, x_shard_k: torch.Tensor, w_shard_k: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """y_shard_m [M/W, N] = reduce_scatter(x_shard_k @ w_shard_k.T) + bias."""
    bias = bias if bias is None else bias.contiguous()  # kernels read it so
    with linear.forward:
        return linear.plan.fprop.start(linear.domain, linear.tags.fprop, x_shard_k, w_shard_k.t(), bias).finish()


def row_backward(
    linear: PlannedOp, dy_shard_m: torch.Tensor, x: Callable[[], torch.Tensor], w_shard_k: torch.Tensor,
    dw: WeightGradient | None, wants_dx: bool,
) -> torch.Tensor | None:  # fmt: skip
    """dx_shard_k [M, K/W] = all_gather(dy_shard_m) @ w_shard_k, or None.

    x: gives x_shard_k, or its blocks of columns, when dx is under way. dw: gets all_gather(dy_shard_m).T @ x_shard_k; None: it is
    not wanted.
    """
    domain, plan, tags, dx_shard_k = linear.domain, linear.plan, linear.tags, None
    with linear.backward[True, dw is not None]:  # the peers want dy_shard_m, whatever this rank does
        gather = plan.dgrad.start(domain, tags.dgrad, dy_shard_m)
        if wants_dx:
            dx_shard_k = gather.matmul(w_shard_k)
            if dw is not None:
                gather.keep_own(plan.dgrad)
        if dw is not None:
            with profiled(tags.ranges.wgrad):
                dw.add(gather.gathered(dw.is_delayed), x())
    return dx_shard_k


def all_gather_linear(
    x_shard_m: torch.Tensor,
    w_shard_n: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    config: OverlapConfig | None = None,
    name: str = "all_gather_linear",
    on_plan: OnPlan | None = None,
) -> torch.Tensor:
    """Column-parallel linear on a sequence-parallel input.

        x_shard_m  [M/W, K]   as [s/W, ..., K], first dimension sharded over the group
        w_shard_n  [N/W, K]   weight sharded over its output features
        bias       [N/W]
        y_shard_n  [M, N/W] = all_gather(x_shard_m) @ w_shard_n.T + bias, as [s, ..., N/W]
        dx_shard_m [M/W, K] = reduce_scatter(dy_shard_n @ w_shard_n)
        dw_shard_n [N/W, K] = dy_shard_n.T @ all_gather(x_shard_m)

    Args:
        group: the overlap domain; all its ranks make the same calls in the same order.
        config: method, policies and limits; None: the defaults, with the provider and the limits of the group's first call.
        name: what errors and profiles call this operator; the same on all ranks, which recognise each other's calls by it.
        on_plan: is called before the call runs, with its plan, which says what runs and why (`plan.fprop.method` and `.reason`,
            `plan.dgrad`), and with the autotune run in which it takes part (`tune_steps`), or None.

    Returns:
        y_shard_n in the dtype of x_shard_m (fp32, fp16 or bf16); products are accumulated in fp32, and rounded once the bias is
        added. Where `w_shard_n.main_grad` exists, backward adds dw into it (config.main_grad). Where `w_shard_n.fp8_copies` is
        an `Fp8Copies`, calls in fp8 take the weight in fp8 from there. Where `w_shard_n.wgrad_store` is TransformerEngine's
        WeightGradStore, backward leaves the product for dw to it.

    Raises:
        ValueError: shapes, dtypes, devices or group do not fit; on every rank of the group.
        OverlapTimeoutError: a peer did not arrive within config.timeout_s.
        OverlapMismatchError: a peer is in another call.
        RuntimeError: a CUDA graph is captured outside `graphed` or before the same call ran eagerly, symmetric memory is gone
            (`shutdown`), or a kernel as compiled here lacks a wait or a signal.

    Source: Triton-distributed (arXiv 2504.19442) section 3.2; TileLink and Flux describe the same decomposition.
    """
    return call(
        all_gather_linear, ALL_GATHER_LINEAR, _apply_all_gather, x_shard_m, w_shard_n, bias,
        group, config, name, on_plan,
    )  # fmt: skip


def linear_reduce_scatter(
    x_shard_k: torch.Tensor,
    w_shard_k: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    config: OverlapConfig | None = None,
    name: str = "linear_reduce_scatter",
    on_plan: OnPlan | None = None,
) -> torch.Tensor:
    """Row-parallel linear with a sequence-parallel output.

        x_shard_k  [M, K/W]   as [s, ..., K/W], last dimension sharded over the group
        w_shard_k  [N, K/W]   weight sharded over its input features
        bias       [N]        the same on every rank
        y_shard_m  [M/W, N] = reduce_scatter(x_shard_k @ w_shard_k.T) + bias, as [s/W, ..., N]
        dx_shard_k [M, K/W] = all_gather(dy_shard_m) @ w_shard_k
        dw_shard_k [N, K/W] = all_gather(dy_shard_m).T @ x_shard_k

    The gradient of bias is that of this rank's rows; sum it over the group (Megatron does so for parameters that are marked
    `sequence_parallel`).

    Arguments, dtypes, errors: see all_gather_linear. The first dimension of x_shard_k must be divisible by W. All methods but
    collective reduce in fp32 and in a fixed order: every run gives the same bits. collective reduces as NCCL or gloo does, and
    adds the bias to what they have rounded, as groups across nodes do.

    Source: Triton-distributed (arXiv 2504.19442) section 3.3.
    """
    return call(
        linear_reduce_scatter, LINEAR_REDUCE_SCATTER, _apply_reduce_scatter, x_shard_k, w_shard_k, bias,
        group, config, name, on_plan,
    )  # fmt: skip


def call(
    operator: Callable[..., torch.Tensor], spec: OperatorSpec, apply: Callable[..., torch.Tensor], x: Any, w: Any, bias: Any,
    group: dist.ProcessGroup, config: OverlapConfig | None, name: str, on_plan: OnPlan | None,
) -> torch.Tensor:  # fmt: skip
    """The call of a public operator: as torch.compile traces it, or by `apply`, its autograd function, with the plan of these
    operands. Of DTensors it takes the shards."""
    if torch.compiler.is_dynamo_compiling():
        from .compiled import traced  # which a program that compiles nothing does not load

        return traced(operator, x, w, bias, group=group, config=config, name=name, on_plan=on_plan)
    if type(x) not in PLAIN or type(w) not in PLAIN or type(bias) not in PLAIN_OR_NONE:
        x, w, bias = local_operands(spec, group, x, w, bias)
    if torch._C._len_torch_dispatch_stack():
        with _unseen():
            return apply(x, w, bias, op_of(spec, x, w, bias, group, config, name, on_plan))
    return apply(x, w, bias, op_of(spec, x, w, bias, group, config, name, on_plan))


def run_eagerly(operator: Callable[..., Any], *operands: Any, **settings: Any) -> Any:
    """The call, outside of what torch.compile traces: Dynamo cannot follow the driver calls in it."""
    from .compiled import eagerly

    return eagerly(operator, *operands, **settings)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] as [M, K]."""
    return x if x.dim() == 2 else x.flatten(0, -2)


def as_sequence(y: torch.Tensor | None, length: int, x_shape: torch.Size) -> torch.Tensor | None:
    """y [M, N], if there is one, as [length, ..., N], with the middle dimensions of x. The same tensor and no view: callers may
    write into it (Megatron's cross entropy does), which autograd refuses for views that were made inside an autograd function."""
    return y if y is None or len(x_shape) == 2 else y.resize_(length, *x_shape[1:-1], y.shape[1])


class _AllGatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_shard_m: torch.Tensor, w_shard_n: torch.Tensor, bias: torch.Tensor | None, linear: PlannedOp
    ) -> torch.Tensor | None:
        rows, (wants_dx, wants_dw) = as_rows(x_shard_m), ctx.needs_input_grad[:2]
        if (passes := in_fp8(linear)) is None:
            y_shard_n, gathered = column_forward(linear, rows, w_shard_n, bias)
            saved = (gathered if linear.keeps else x_shard_m,) if wants_dw else (None,)
        else:
            y_shard_n, saved = passes.column_forward(linear, rows, w_shard_n, bias, wants_dx, wants_dw)
        # weight: itself, for what it carries; hooks on saved tensors (checkpointing) give back another object.
        ctx.linear, ctx.weight, ctx.x_shape = linear, w_shard_n, x_shard_m.shape
        ctx.save_for_backward(*saved, w_shard_n)
        return as_sequence(y_shard_n, ctx.x_shape[0] * linear.domain.world_size, ctx.x_shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_shard_n: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        linear, (wants_dx, wants_dw), (*saved, w_shard_n) = ctx.linear, ctx.needs_input_grad[:2], ctx.saved_tensors
        dw, dy_rows = WeightGradient.of_backward(ctx), as_rows(dy_shard_n)
        if not (wants_dx or wants_dw):
            return gradients(ctx, None, dw, dy_rows)
        if (passes := in_fp8(linear)) is None:
            x = None if saved[0] is None else as_rows(saved[0])
            dx = column_backward(linear, dy_rows, x, w_shard_n, dw, wants_dx)
        else:
            dx = passes.column_backward(linear, dy_rows, saved, ctx.weight, dw, wants_dx)
        return gradients(ctx, dx, dw, dy_rows)


class _LinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_shard_k: torch.Tensor, w_shard_k: torch.Tensor, bias: torch.Tensor | None, linear: PlannedOp
    ) -> torch.Tensor | None:
        rows, (wants_dx, wants_dw) = as_rows(x_shard_k), ctx.needs_input_grad[:2]
        if (passes := in_fp8(linear)) is None:
            y_shard_m, saved = row_forward(linear, rows, w_shard_k, bias), (x_shard_k if wants_dw else None,)
        else:
            y_shard_m, saved = passes.row_forward(linear, rows, w_shard_k, bias, wants_dx, wants_dw)
        ctx.linear, ctx.weight, ctx.x_shape = linear, w_shard_k, x_shard_k.shape  # as above
        ctx.save_for_backward(*saved, w_shard_k)
        return as_sequence(y_shard_m, ctx.x_shape[0] // linear.domain.world_size, ctx.x_shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_shard_m: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        linear, (wants_dx, wants_dw), (*saved, w_shard_k) = ctx.linear, ctx.needs_input_grad[:2], ctx.saved_tensors
        dw, dy_rows = WeightGradient.of_backward(ctx), as_rows(dy_shard_m)
        if not (wants_dx or wants_dw):  # no rank wants the others' rows
            return gradients(ctx, None, dw, dy_rows)
        if (passes := in_fp8(linear)) is None:
            dx = row_backward(linear, dy_rows, lambda: as_rows(saved[0]), w_shard_k, dw, wants_dx)
        else:
            dx = passes.row_backward(linear, dy_rows, saved, ctx.weight, dw, wants_dx)
        return gradients(ctx, dx, dw, dy_rows)


def gradients(
    ctx: Any, dx: torch.Tensor | None, dw: WeightGradient | None, dy_rows: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """What a backward returns: of x, of the weight, of the bias, of nothing."""
    dbias = dy_rows.sum(0) if ctx.needs_input_grad[2] else None
    return as_sequence(dx, ctx.x_shape[0], ctx.x_shape), None if dw is None else dw.result(), dbias, None


def in_fp8(linear: PlannedOp) -> ModuleType | None:
    """The module with the same four passes in the fp8 of a call; None: it is in its own dtype."""
    fp8 = linear.plan.config.fp8
    if fp8 == "off":
        return None
    return import_module("..blockwise" if fp8 == "blockwise" else "..fp8", __name__)


_apply_all_gather, _apply_reduce_scatter = applied(_AllGatherLinear), applied(_LinearReduceScatter)
