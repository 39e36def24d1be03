"""The same model without the communication of its linears: what a step would take if all of it were hidden.

Every linear multiplies matrices of its usual sizes, on data that is in place already. A whole tensor kept from the first call
stands for a gathered input or gradient, and a partial sum is cut instead of scattered. The all-to-alls of Ulysses are left out
(alone_ulysses.py). Results are wrong, times are right.
Products are cuBLAS's in every variant: if a fused kernel multiplies more slowly, the difference counts as communication.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from mfu.alone_ulysses import HeadsAlone, SequenceAlone
from overlap_train.integrations.megatron.attention import collective
from overlap_train.integrations.megatron.linears.conditions import divides_weights
from overlap_train.integrations.megatron.linears.ulysses import exchanges
from overlap_train.ops.wgrad import weight_gradient


class Wholes:
    """Whole tensors [M, K] in place of gathered shards [M/W, K]: W copies of the first call's shard."""

    def __init__(self, world: int, main_grad: str) -> None:
        self.world, self.main_grad = world, main_grad  # main_grad: "accumulate" or "off", as in OverlapConfig
        self._kept: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        key = shard.shape, shard.dtype
        if key not in self._kept:
            self._kept[key] = shard.detach().repeat(self.world, 1)
        return self._kept[key]


class _Column(torch.autograd.Function):
    """x [M/W, K], w [N/W, K] -> whole @ wᵀ [M, N/W]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, wholes: Wholes) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.wholes = wholes
        return wholes.of(x) @ w.t()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, w = ctx.saved_tensors
        dx = dy @ w
        return dx[: len(x)], weight_gradient(dy, ctx.wholes.of(x), w, ctx.wholes.main_grad), None


class _Row(torch.autograd.Function):
    """x [M, K/W], w [N, K/W] -> the first M/W rows of x @ wᵀ."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, wholes: Wholes) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.wholes = wholes
        return (x @ w.t())[: len(x) // wholes.world]

    @staticmethod
    def backward(ctx: Any, dz: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, w = ctx.saved_tensors
        whole = ctx.wholes.of(dz)
        return whole @ w, weight_gradient(whole, x, w, ctx.wholes.main_grad), None


class ColumnAlone(ColumnParallelLinear):
    """Stands in for a column-parallel linear of any kind, given `wholes`."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        y = _Column.apply(input.flatten(0, 1), weight, self.wholes)
        return y.view(-1, input.shape[1], y.shape[1])


class RowAlone(RowParallelLinear):
    """Stands in for a row-parallel linear of any kind, given `wholes`."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        z = _Row.apply(input_.flatten(0, 1), self.weight, self.wholes)
        return z.view(-1, input_.shape[1], z.shape[1]), None


@contextlib.contextmanager
def without_communication(model: torch.nn.Module, wholes: Wholes) -> Iterator[None]:
    """Let a model's parallel linears compute alone, forward and backward, until the end of the block."""
    linears = [linear for linear in parallel_linears(model) if wholes.world > 1 or exchanges(linear)]
    classes, exchanged = [linear.__class__ for linear in linears], collective._exchanged
    collective._exchanged = lambda blocks, group: blocks.contiguous()  # of attentions under tensor parallelism
    for linear in linears:
        linear.__class__, linear.wholes = _alone(linear), wholes
    try:
        yield
    finally:
        collective._exchanged = exchanged
        for linear, kind in zip(linears, classes, strict=True):
            linear.__class__ = kind
            del linear.wholes


def _alone(linear: Any) -> type:
    """The class that stands in for a linear. If tensor parallelism divides the weights of a Ulysses attention, its linears gather
    and scatter alone, and the attention exchanges by the collective that without_communication leaves out."""
    does_exchange = exchanges(linear) and not divides_weights(linear)
    column, row = (HeadsAlone, SequenceAlone) if does_exchange else (ColumnAlone, RowAlone)
    return column if isinstance(linear, ColumnParallelLinear) else row


def parallel_linears(model: torch.nn.Module) -> list[Any]:
    """The linears of a model that gather or scatter a sequence: not those of experts, whose dispatcher communicates."""
    kinds = (ColumnParallelLinear, RowParallelLinear)
    return [module for module in model.modules() if isinstance(module, kinds) and not module.is_expert]
