"""One pass of one operator, as the choice of a method sees it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .hardware import COPY_GBS, GEMM_TFLOPS
from .schedule import GATHER, SCATTER

SCATTER_AND_WGRAD = "scatter, wgrad"
KINDS = (GATHER, SCATTER, SCATTER_AND_WGRAD)

Bucket = tuple[str, str, int, int, int, int]


@dataclass(frozen=True)
class Pass:
    """y [m, n] = x [m, k] @ b [k, n] on one rank, after an all-gather of x or before a reduce-scatter of y.

    kind: "gather" (AG + GEMM), "scatter" (GEMM + RS), or "scatter, wgrad": a column linear's dgrad, whose reduce-scatter may run
    under the weight gradient that comes after it. m: global rows.
    """

    kind: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    world: int

    @property
    def dgrad(self) -> Pass:
        """The dgrad that goes with this fprop: dy [m, n] @ b.T [n, k], by the other engine."""
        kind = SCATTER_AND_WGRAD if self.kind == GATHER else GATHER
        return Pass(kind, self.m, self.k, self.n, self.dtype, self.world)

    @property
    def gemm_us(self) -> float:
        """What its product takes at the rate of a long run."""
        return 2 * self.m * self.n * self.k / (GEMM_TFLOPS * 1e6)

    @property
    def copy_us(self) -> float:
        """What one rank sends takes over NVLink, with the gaps between copies."""
        features = self.k if self.kind == GATHER else self.n
        return (self.world - 1) / self.world * self.m * features * self.dtype.itemsize / (COPY_GBS * 1e3)

    @property
    def bucket(self) -> Bucket:
        """Passes with the same bucket share a measurement: sizes within a factor of 1.5 of each other."""
        return self.kind, dtype_name(self.dtype), self.world, rounded_up(self.m), rounded_up(self.n), rounded_up(self.k)

    def __str__(self) -> str:
        return f"M={self.m} N={self.n} K={self.k}"


def rounded_up(size: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: powers of two and the middles between them."""
    power = 1 << (size - 1).bit_length()
    middle = power * 3 // 4
    return middle if power >= 4 and size <= middle else power


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")
