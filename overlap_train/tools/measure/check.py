"""Correct first: each result against the unsharded product in fp64, within what rounding explains.

Inputs are exact in their dtype. With u = eps(dtype) / 2, e = eps(fp32) and p_r the partial product of rank r:

    product over K          |y - exact| <= u |exact| + 2 K e |a| |b|
    sum of W partials       |y - exact| <= u |exact| + W u sum_r |p_r| + 2 (K + W) e |a| |b|

The second allows every partial sum to be rounded to the dtype (NCCL does). |a| |b| is bounded by the product of the
norms of the row and the column. Both get 5 % for terms of higher order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


class WrongResult(RuntimeError):
    """A result differs from the unsharded product by more than rounding explains."""


@dataclass(frozen=True)
class Reference:
    """The unsharded result of a pass, and how far ours may be from it. exact: fp64; tolerance: fp64, same shape."""

    exact: torch.Tensor
    tolerance: torch.Tensor


_HIGHER_ORDER = 1.05


def product_reference(a: torch.Tensor, b: torch.Tensor) -> Reference:
    """a [M, K] @ b [K, N], both whole on this rank."""
    exact = a.double() @ b.double()
    unit, eps32 = torch.finfo(a.dtype).eps / 2, torch.finfo(torch.float32).eps
    tolerance = unit * exact.abs() + 2 * a.shape[1] * eps32 * _norms(a, b)
    return Reference(exact, _HIGHER_ORDER * tolerance)


def scatter_reference(a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup) -> Reference:
    """This rank's rows of the sum over ranks of a [M, K/W] @ b [K/W, N]. Collective."""
    world = dist.get_world_size(group)
    partial = a.double() @ b.double()
    exact, spread = _scatter(partial, group), _scatter(partial.abs(), group)
    unit, eps32 = torch.finfo(a.dtype).eps / 2, torch.finfo(torch.float32).eps
    rounding = unit * exact.abs() + world * unit * spread
    accumulation = 2 * (world * a.shape[1] + world) * eps32 * _scatter(_norms(a, b), group)
    return Reference(exact, _HIGHER_ORDER * (rounding + accumulation))


def check(name: str, actual: torch.Tensor, reference: Reference) -> None:
    """Raises WrongResult with the number of wrong elements and the worst of them. NaN is wrong."""
    if actual.shape != reference.exact.shape:
        raise WrongResult(f"{name}: shape {tuple(actual.shape)} instead of {tuple(reference.exact.shape)}")
    error = (actual.double() - reference.exact).abs()
    wrong = ~(error <= reference.tolerance)
    count = int(wrong.sum())
    if count:
        worst = float((error / reference.tolerance).nan_to_num(nan=torch.inf).max())
        raise WrongResult(
            f"{name}: {count} of {actual.numel()} elements differ from the unsharded product by more than rounding "
            f"explains, the worst by {worst:.3g} times the bound"
        )


def _norms(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.outer(a.double().norm(dim=1), b.double().norm(dim=0))


def _scatter(full: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    mine = full.new_empty(full.shape[0] // dist.get_world_size(group), full.shape[1])
    dist.reduce_scatter_tensor(mine, full.contiguous(), group=group)
    return mine
