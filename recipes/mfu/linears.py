"""What stands in for Megatron's parallel linears: PyTorch's async-TP, and the same linears without their communication.

The latter show what a step would take if all communication were hidden. Every linear multiplies matrices of its usual sizes, on
data that is in place already. A whole tensor kept from the first call stands for a gathered input or gradient, and a partial sum
is cut instead of scattered. Results are wrong, times are right. All GEMMs are cuBLAS's: if a fused kernel multiplies more slowly,
the difference counts as communication. W: tensor-parallel ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from overlap_train.tools.bench.async_tp import AsyncColumn, AsyncRow


class Column(ColumnParallelLinear):
    """x [s/W, b, K] -> [s, b, N/W] by its `stand_in`: a product of matrices x, w, and what this takes beside them."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _of_matrices(self, input, weight)


class Row(RowParallelLinear):
    """x [s, b, K/W] -> [s/W, b, N], likewise."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _of_matrices(self, input_, self.weight), None


def _of_matrices(linear: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    product, given = linear.stand_in
    y = product(x.flatten(0, 1), weight, given)
    return y.view(-1, x.shape[1], y.shape[1])


def parallel_linears(model: torch.nn.Module) -> list[Any]:
    """The linears of a model that gather or scatter a sequence: not those of experts, whose dispatcher communicates."""
    kinds = (ColumnParallelLinear, RowParallelLinear)
    return [module for module in model.modules() if isinstance(module, kinds) and not module.is_expert]


def use_async_tp(model: GPTModel) -> GPTModel:
    """Exchange the classes of the model's parallel linears, as enable() does."""
    for linear in parallel_linears(model):
        _exchange(linear, AsyncColumn, AsyncRow, linear.tp_group)
    return model


@contextlib.contextmanager
def without_communication(model: torch.nn.Module, wholes: Wholes) -> Iterator[None]:
    """Let a model's parallel linears compute alone, forward and backward, until the end of the block."""
    linears = parallel_linears(model) if wholes.ranks > 1 else []
    before = [(linear.__class__, getattr(linear, "stand_in", None)) for linear in linears]
    for linear in linears:
        _exchange(linear, _ColumnAlone, _RowAlone, wholes)
    try:
        yield
    finally:
        for linear, was in zip(linears, before, strict=True):
            linear.__class__, linear.stand_in = was


def _exchange(linear: Any, column: Any, row: Any, given: Any) -> None:
    is_column = isinstance(linear, ColumnParallelLinear)
    linear.stand_in = (column.apply if is_column else row.apply, given)
    linear.__class__ = Column if is_column else Row


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

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """dyᵀ @ x [N, K], returned or added into w.main_grad."""
        if not self.adds_in_place:
            return dy.t() @ x
        import fused_weight_gradient_mlp_cuda  # Apex's, or ours in its place: provide_accumulation_fusion

        fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(x, dy, w.main_grad)
        w.grad_added_to_main_grad = True
        return torch.empty_like(w)


class _ColumnAlone(torch.autograd.Function):
    """x [M/W, K], w [N/W, K] -> whole @ wᵀ [M, N/W]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, wholes: Wholes) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.wholes = w, wholes  # a saved weight would come back as another object, without main_grad
        return wholes.of(x) @ w.t()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        dx = dy @ ctx.weight
        return dx[: len(x)], ctx.wholes.weight_gradient(dy, ctx.wholes.of(x), ctx.weight), None


class _RowAlone(torch.autograd.Function):
    """x [M, K/W], w [N, K/W] -> the first M/W rows of x @ wᵀ."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, wholes: Wholes) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.wholes = w, wholes
        return (x @ w.t())[: len(x) // wholes.ranks]

    @staticmethod
    def backward(ctx: Any, dz: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        whole = ctx.wholes.of(dz)
        return whole @ ctx.weight, ctx.wholes.weight_gradient(whole, x, ctx.weight), None
