"""Correct first: each result against the unsharded product in fp64, within what rounding explains.

Inputs are exact in their dtype. With u = eps(dtype) / 2, e = eps(fp32) and p_r the partial product of rank r:

    product over K          |y - exact| <= u |exact| + 2 K e |a| |b|
    sum of W partials       |y - exact| <= u |exact| + W u sum_r |p_r| + 2 (K + W) e |a| |b|

The second allows every partial sum to be rounded to the dtype (NCCL does). |a| |b| is bounded by the product of the
norms of the row and the column. Both get 5 % for terms of higher order. What is in fp64 takes four times as much memory as the
inputs: products are made and compared block by block, and of a product over K only the exact result stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .world import World


class WrongResult(RuntimeError):
    """A result differs from the unsharded product by more than rounding explains."""


@dataclass(frozen=True)
class Reference:
    """The unsharded result of a pass, and how far ours may be from it. exact: fp64 [M, N]. tolerance: rows ->
    what these may differ by, fp64 [rows, N]."""

    exact: torch.Tensor
    tolerance: Callable[[slice], torch.Tensor]


_HIGHER_ORDER = 1.05
_BLOCK = 1 << 26  # elements of a block of rows: 512 MiB in fp64


def product_reference(a: torch.Tensor, b: torch.Tensor) -> Reference:
    """a [M, K] @ b [K, N], both whole on this rank."""
    exact, (in_rows, in_columns) = _product(a, b), _norms(a, b)
    unit, sums = torch.finfo(a.dtype).eps / 2, 2 * a.shape[1] * torch.finfo(torch.float32).eps

    def tolerance(rows: slice) -> torch.Tensor:
        accumulation = sums * torch.outer(in_rows[rows], in_columns)
        return _HIGHER_ORDER * (accumulation + unit * exact[rows].abs())

    return Reference(exact, tolerance)


def scatter_reference(a: torch.Tensor, b: torch.Tensor, world: World) -> Reference:
    """This rank's rows of the sum over ranks of a [M, K/W] @ b [K/W, N]. Collective."""
    partial = _product(a, b)
    exact, spread = world.scatter(partial), world.scatter(partial.abs())
    unit, eps32 = torch.finfo(a.dtype).eps / 2, torch.finfo(torch.float32).eps
    rounding = unit * exact.abs() + world.size * unit * spread
    accumulation = 2 * world.size * (a.shape[1] + 1) * eps32 * world.scatter(torch.outer(*_norms(a, b)))
    tolerance = _HIGHER_ORDER * (rounding + accumulation)
    return Reference(exact, tolerance.__getitem__)


def check(name: str, actual: torch.Tensor, reference: Reference) -> None:
    """Raises WrongResult with the number of wrong elements and the worst of them. NaN is wrong."""
    if actual.shape != reference.exact.shape:
        raise WrongResult(f"{name}: shape {tuple(actual.shape)} instead of {tuple(reference.exact.shape)}")
    count, worst = 0, 0.0
    for rows in _blocks(len(actual), actual.numel() // max(1, len(actual))):
        error, bound = (actual[rows].double() - reference.exact[rows]).abs(), reference.tolerance(rows)
        if wrong := int((~(error <= bound)).sum()):
            count += wrong
            worst = max(worst, float((error / bound).nan_to_num(nan=torch.inf).max()))
    if count:
        raise WrongResult(
            f"{name}: {count} of {actual.numel()} elements differ from the unsharded product by more than rounding "
            f"explains, the worst by {worst:.3g} times the bound"
        )


@torch.no_grad()
def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] @ b [K, N] in fp64."""
    exact = a.new_empty(a.shape[0], b.shape[1], dtype=torch.float64)
    for columns in _blocks(b.shape[1], a.shape[1]):
        b64 = b[:, columns].double()
        for rows in _blocks(a.shape[0], max(b64.shape)):  # neither those of a nor those of the product are larger
            exact[rows, columns] = a[rows].double() @ b64
    return exact


def _norms(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a's rows and of b's columns, fp64. Torch makes a whole copy in fp64 of what it takes the norm of."""
    in_rows = [torch.linalg.vector_norm(a[rows].double(), dim=1) for rows in _blocks(*a.shape)]
    in_columns = [torch.linalg.vector_norm(b[:, columns].double(), dim=0) for columns in _blocks(*b.t().shape)]
    return torch.cat(in_rows), torch.cat(in_columns)


def _blocks(rows: int, width: int) -> Iterator[slice]:
    """Ranges of rows that are so wide, of at most _BLOCK elements each."""
    most = max(1, _BLOCK // max(1, width))
    return (slice(first, first + most) for first in range(0, rows, most))
