"""The calls that host_time.py times: ours by each method, and others beside them, on small operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from overlap_train import OverlapConfig, all_gather_linear, linear_reduce_scatter

METHODS = ("low_latency", "direct", "fused", "collective")
Call = Callable[[], object]


@dataclass(frozen=True)
class Operands:
    """x [M/W, K], column [N/W, K]; h [M, N/W], row [K, N/W]; gradients dy [M, N/W], dz [M/W, K]; K = N/W.

    whole, dwhole: x of all ranks, and the gradient of a row linear without a reduction, [M, K].
    """

    x: torch.Tensor
    column: torch.Tensor
    h: torch.Tensor
    row: torch.Tensor
    dy: torch.Tensor
    dz: torch.Tensor
    whole: torch.Tensor
    dwhole: torch.Tensor


def operands_of(rows: int, features: int, device: torch.device, world: int) -> Operands:
    def tensor(m: int, trained: bool = True) -> torch.Tensor:
        return torch.randn(m, features, device=device, dtype=torch.bfloat16, requires_grad=trained)

    x, column, h, row = tensor(rows // world), tensor(features), tensor(rows), tensor(features)
    return Operands(
        x, column, h, row, tensor(rows, False), tensor(rows // world, False), tensor(rows), tensor(rows, False)
    )


@dataclass(frozen=True)
class Linear:
    """One linear, or both: what makes its outputs, and what autograd is given and asked for."""

    forward: Callable[[], tuple[torch.Tensor, ...]]
    inputs: tuple[torch.Tensor, ...]
    grads: tuple[torch.Tensor, ...]

    def backward(self, outputs: tuple[torch.Tensor, ...]) -> None:
        torch.autograd.grad(outputs, self.inputs, self.grads)

    def __add__(self, other: Linear) -> Linear:
        return Linear(lambda: self.forward() + other.forward(), self.inputs + other.inputs, self.grads + other.grads)


def linears_of(o: Operands) -> dict[str, dict[str, Linear]]:
    """By operator and method; F.linear has all of x."""
    column = {"F.linear": Linear(lambda: (F.linear(o.whole, o.column),), (o.whole, o.column), (o.dy,))}
    row = {"F.linear": Linear(lambda: (F.linear(o.h, o.row),), (o.h, o.row), (o.dwhole,))}
    for method in METHODS:
        said = dict(group=dist.group.WORLD, config=OverlapConfig(method=method))
        column[method] = Linear(lambda said=said: (all_gather_linear(o.x, o.column, **said),), (o.x, o.column), (o.dy,))
        row[method] = Linear(lambda said=said: (linear_reduce_scatter(o.h, o.row, **said),), (o.h, o.row), (o.dz,))
    return {"column": column, "row": row, "both": {method: column[method] + row[method] for method in column}}


def sequence(o: Operands) -> dict[tuple[str, str], Call]:
    """What the method `collective` does, written out: no checks, no plan, no autograd. By operator and pass."""
    x, h, dy, dz = o.x.detach(), o.h.detach(), o.dy, o.dz
    column, row = o.column.detach(), o.row.detach()

    def gather(shard: torch.Tensor) -> torch.Tensor:
        whole = shard.new_empty(len(shard) * dist.get_world_size(), shard.shape[1])
        dist.all_gather_into_tensor(whole, shard)
        return whole

    def scatter(partial: torch.Tensor) -> torch.Tensor:
        y = partial.new_empty(len(partial) // dist.get_world_size(), partial.shape[1])
        dist.reduce_scatter_tensor(y, partial)
        return y

    def column_backward() -> object:
        whole, dx = gather(x), scatter(torch.mm(dy, column))
        return dx, torch.mm(dy.t(), whole)

    def row_backward() -> object:
        whole = gather(dz)
        return torch.mm(whole, row), torch.mm(whole.t(), h)

    found: dict[tuple[str, str], Call] = {
        ("column", "fprop"): lambda: torch.mm(gather(x), column.t()),
        ("row", "fprop"): lambda: scatter(torch.mm(h, row.t())),
        ("column", "bprop"): column_backward,
        ("row", "bprop"): row_backward,
    }
    for what in ("fprop", "bprop"):
        found["both", what] = lambda what=what: (found["column", what](), found["row", what]())
    return found
