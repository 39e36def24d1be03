"""Correct first: each result against torch's, on whole matrices, within what rounding explains.

With eps of the dtype, the usual size r of a row's elements (root mean square) and 4 roundings, an element may differ by

    4 eps (|expected| + r)

That allows every partial sum of eight ranks to be rounded to the dtype, as NCCL does.
"""

from __future__ import annotations

import torch

ROUNDINGS = 4
# Tensor cores add up products in fp8 in fewer bits, over the longest K. What is out of place is wrong by far more.
ROUNDINGS_IN_FP8 = 16
_SUMS = 1e-3  # what sums in another order may add to fp32
_BLOCK = 4096  # rows that are compared at once: copies in fp32 are large


class WrongResult(RuntimeError):
    """A result differs from torch's by more than rounding explains."""


def check(name: str, found: torch.Tensor, expected: torch.Tensor, roundings: int = ROUNDINGS) -> None:
    """Raises WrongResult with the number of wrong elements. NaN is wrong."""
    if found.shape != expected.shape:
        raise WrongResult(f"{name}: shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
    tolerance, wrong = max(roundings * torch.finfo(found.dtype).eps, _SUMS), 0
    for ours, theirs in zip(found.split(_BLOCK), expected.split(_BLOCK), strict=True):
        size = theirs.float().square().mean(dim=-1, keepdim=True).sqrt()
        is_right = (ours.float() - theirs.float()).abs() <= tolerance * (theirs.float().abs() + size)
        wrong += int((~is_right).sum())
    if wrong:
        raise WrongResult(
            f"{name}: {wrong} of {found.numel()} elements differ from torch's by more than rounding explains"
        )
