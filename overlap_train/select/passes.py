"""One pass of one operator, as the choice of a method sees it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..schedule.kinds import Kind

Bucket = tuple[str, str, int, int, int, int]


@dataclass(frozen=True)
class Pass:
    """One product of one rank, and what it sends or receives.

    kind                       the rank multiplies           a block that a peer sends
    gather    AG + GEMM        [m, k] @ [k, n]               [m/W, k]
    scatter   GEMM + RS        [m, k] @ [k, n]               [m/W, n]
    a2a_gemm  A2A + GEMM       [m/W, k] @ [k, n]             [m/W, k/W]
    gemm_a2a  GEMM + A2A       [m/W, k] @ [k, n]             [m/W, n/W]

    "scatter, wgrad" is a column linear's dgrad, whose reduce-scatter may run under the weight gradient that comes after it.
    m: global rows.
    """

    kind: Kind
    m: int
    n: int
    k: int
    dtype: torch.dtype
    world: int

    @property
    def dgrad(self) -> Pass:
        """The dgrad that goes with this fprop: dy [m, n] @ b.T [n, k], by the other engine."""
        return Pass(self.kind.dgrad, self.m, self.k, self.n, self.dtype, self.world)

    @property
    def rows(self) -> int:
        """The rows that this rank multiplies: m, or m/W in an all-to-all."""
        return self.m // self.world if self.kind.exchanges else self.m

    @property
    def row_features(self) -> int:
        """The features of one row of a block that a peer sends."""
        features = self.k if self.kind.receives else self.n
        return features // self.world if self.kind.exchanges else features

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends to all others."""
        return (self.world - 1) / self.world * self.m * self.row_features * self.dtype.itemsize

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
