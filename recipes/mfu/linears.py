"""What stands in for Megatron's parallel linears: PyTorch's async-TP, and the same linears without their communication.

The latter show what a step would take if all communication were hidden. Every linear multiplies matrices of its usual sizes, on
data that is in place already. A whole tensor kept from the first call stands for a gathered input or gradient, and a partial sum
is cut instead of scattered. Results are wrong, times are right. All GEMMs are cuBLAS's: if a fused kernel multiplies more slowly,
the difference counts as communication. W: tensor-parallel ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from overlap_train.tools.bench.async_tp import AsyncColumn, AsyncRow


class Column(ColumnParallelLinear):
    """x [s/W, b, K] -> [s, b, N/W] by its `stand_in`, a function of matrices x and w."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        y = self.stand_in(input.flatten(0, 1), weight)
        return y.view(-1, input.shape[1], y.shape[1])


class Row(RowParallelLinear):
    """x [s, b, K/W] -> [s/W, b, N], likewise."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        y = self.stand_in(input_.flatten(0, 1), self.weight)
        return y.view(-1, input_.shape[1], y.shape[1]), None


def parallel_linears(model: torch.nn.Module) -> list[Any]:
    """The linears of a model that gather or scatter a sequence: not those of experts, whose dispatcher communicates."""
    kinds = (ColumnParallelLinear, RowParallelLinear)
    return [module for module in model.modules() if isinstance(module, kinds) and not module.is_expert]


def use_async_tp(model: GPTModel) -> GPTModel:
    """Exchange the classes of the model's parallel linears, as enable() does."""
    for linear in parallel_linears(model):
        is_column = isinstance(linear, ColumnParallelLinear)
        function, linear.__class__ = (AsyncColumn, Column) if is_column else (AsyncRow, Row)
        linear.stand_in = partial(_apply, function, linear.tp_group)
    return model


def _apply(function: Any, given: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return function.apply(x, w, given)


@contextlib.contextmanager
def without_communication(model: torch.nn.Module, wholes: Wholes) -> Iterator[None]:
    """Let a model's parallel linears compute alone, forward and backward, until the end of the block."""
    linears = parallel_linears(model) if wholes.ranks > 1 else []
    before = [(linear.__class__, getattr(linear, "stand_in", None)) for linear in linears]
    for linear in linears:
        is_column = isinstance(linear, ColumnParallelLinear)
        linear.__class__ = Column if is_column else Row
        linear.stand_in = partial(_apply, _Alone, (wholes, is_column))
    try:
        yield
    finally:
        for linear, was in zip(linears, before, strict=True):
            linear.__class__, linear.stand_in = was


class Wholes:
    """Whole tensors [M, K] in place of gathered shards [M/W, K]: W copies of the first call's shard.
    adds_in_place: whether weight gradients are added into main_grad inside the GEMM."""

    def __init__(self, ranks: int, adds_in_place: bool) -> None:
        self.ranks, self.adds_in_place = ranks, adds_in_place
        self._kept: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        key = shard.shape, shard.dtype
        if key not in self._kept:
            self._kept[key] = shard.detach().repeat(self.ranks, 1)
        return self._kept[key]


class _Alone(torch.autograd.Function):
    """Column: x [M/W, K], w [N/W, K] -> whole x @ wᵀ [M, N/W]. Row: x [M, K/W], w [N, K/W] -> the first M/W rows of x @ wᵀ."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, given: tuple[Wholes, bool]) -> torch.Tensor:
        wholes, is_column = given
        ctx.save_for_backward(x)
        ctx.weight, ctx.given = w, given  # a saved weight would come back as another object, without main_grad
        return wholes.of(x) @ w.t() if is_column else (x @ w.t())[: len(x) // wholes.ranks]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        (x,), w, (wholes, is_column) = ctx.saved_tensors, ctx.weight, ctx.given
        rows = len(x)
        if is_column:
            x = wholes.of(x)
        else:
            dy = wholes.of(dy)
        dx = (dy @ w)[:rows]
        if not ctx.needs_input_grad[1]:  # frozen
            return dx, None, None
        if not wholes.adds_in_place:
            return dx, dy.t() @ x, None
        import fused_weight_gradient_mlp_cuda  # Apex's, or ours in its place: provide_accumulation_fusion

        fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(x, dy, w.main_grad)
        w.grad_added_to_main_grad = True
        return dx, torch.empty_like(w), None
