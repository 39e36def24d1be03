"""One layer of the layer benchmark: inputs, the call that is timed, and what its results must be.

    y = column(x)  x [s/W, K1], w1 [N1/W, K1] -> [s, N1/W]        z = row(h)  h [s, K2/W], w2 [N2, K2/W] -> [s/W, N2]

Gradients of x, w1, h and w2 are taken by autograd, the row linear's first, and returned in the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from ...group.registry import check as check_timeouts
from ..measure.check import Reference, check, product_reference, scatter_reference
from ..measure.operands import gathered
from ..measure.shapes import Layer
from ..measure.timing import Call
from ..measure.world import World

Linear = Callable[[torch.Tensor], torch.Tensor]
Outcome = tuple[torch.Tensor, ...]  # y, z, dx, dw1, dh, dw2
Maker = Callable[["Data"], tuple[Linear, Linear]]  # linears with the weights of the data
NAMES = ("y", "z", "dx", "dw1", "dh", "dw2")


@dataclass(frozen=True)
class Data:
    """Inputs, weights and output gradients of one layer on this rank; inputs and weights are leaves of autograd."""

    x: torch.Tensor
    w1: torch.nn.Parameter
    dy: torch.Tensor
    h: torch.Tensor
    w2: torch.nn.Parameter
    dz: torch.Tensor

    @classmethod
    def make(cls, layer: Layer, sequence: int, world: World, dtype: torch.dtype, seed: int) -> Data:
        generator, shards = torch.Generator(world.device).manual_seed(1000 * seed + world.rank), world.size

        def normal(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, dtype=dtype, device=world.device, generator=generator)

        n1, k2 = layer.column_n // shards, layer.row_k // shards
        return cls(
            normal(sequence // shards, layer.column_k).requires_grad_(),
            torch.nn.Parameter(normal(n1, layer.column_k)),
            normal(sequence, n1),
            normal(sequence, k2).requires_grad_(),
            torch.nn.Parameter(normal(layer.row_n, k2)),
            normal(sequence // shards, layer.row_n),
        )


def forward_backward(column: Linear, row: Linear, data: Data) -> Call:
    """The call that is timed; returns an Outcome."""
    leaves, gradients = [data.x, data.w1, data.h, data.w2], [data.dy, data.dz]

    def call(index: int) -> Outcome:
        y, z = column(data.x), row(data.h)
        # In this thread: training wakes autograd's own thread, which takes 0.3 ms, once a step and not once a layer.
        with torch.autograd.set_multithreading_enabled(False):
            return (y.detach(), z.detach(), *torch.autograd.grad([y, z], leaves, gradients))

    return call


def six_gemms_alone(data: Data, world: World) -> Call:
    """The call of a layer's six GEMMs without communication, on data in place; z and dx are this rank's partial sums."""
    whole_x, whole_dz = gathered(data.x.detach(), world), gathered(data.dz, world)

    @torch.no_grad()
    def call(index: int) -> Outcome:
        y, z = whole_x @ data.w1.t(), data.h @ data.w2.t()
        dh, dw2 = whole_dz @ data.w2, whole_dz.t() @ data.h
        dx, dw1 = data.dy @ data.w1, data.dy.t() @ whole_x
        return y, z, dx, dw1, dh, dw2

    return call


@torch.no_grad()
def references_of(data: Data, world: World) -> dict[str, Reference]:
    whole_x, whole_dz = gathered(data.x, world), gathered(data.dz, world)
    return {
        "y": product_reference(whole_x, data.w1.t()),
        "z": scatter_reference(data.h, data.w2.t(), world.group),
        "dx": scatter_reference(data.dy, data.w1, world.group),
        "dw1": product_reference(data.dy.t(), whole_x),
        "dh": product_reference(whole_dz, data.w2),
        "dw2": product_reference(whole_dz.t(), data.h),
    }


def check_linears(name: str, make: Maker, data: Data, decoy: Data, references: dict[str, Reference]) -> None:
    """Run twice on other inputs, so that whatever is left in slots and freed memory is wrong, then check all results."""
    other = forward_backward(*make(decoy), decoy)
    for index in range(2):
        other(index)
    check_outcome(name, cast(Outcome, forward_backward(*make(data), data)(0)), references)


def check_outcome(name: str, outcome: Outcome, references: dict[str, Reference]) -> None:
    """Raises WrongResult."""
    check_timeouts()
    for result_name, result in zip(NAMES, outcome, strict=True):
        check(f"{name}: {result_name}", result, references[result_name])
