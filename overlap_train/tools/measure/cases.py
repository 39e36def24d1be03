"""One pass of one linear, as benchmark and tuner measure it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...planning.choice import GATHER, SCATTER, Pass

OPS = ("ag_gemm", "gemm_rs")
PASSES = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class Case:
    """A pass of one operator: x [M, K], weight [N, K], global sizes.

    op: ag_gemm is all_gather_linear, gemm_rs linear_reduce_scatter. The dgrad of one runs the engine of the other; N and K are
    those of the weight in every pass. model: what the printed tables call it.
    """

    model: str
    op: str
    pass_: str
    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        return f"{self.op} {self.pass_} {self.model} M={self.m} N={self.n} K={self.k}"

    @property
    def kind(self) -> str:
        """What the pass does: gather (AG + GEMM), scatter (GEMM + RS) or weight (the weight gradient)."""
        if self.pass_ == "wgrad":
            return "weight"
        return "gather" if (self.op == "ag_gemm") == (self.pass_ == "fprop") else "scatter"

    def flops(self, world: int) -> float:
        """Of one rank's GEMM; the same in all three passes."""
        return 2 * self.m * self.n * self.k / world

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Of what one rank receives: M rows of the features that are not sharded."""
        return self.m * (self.k if self.op == "ag_gemm" else self.n) * dtype.itemsize

    def planned(self, world: int, dtype: torch.dtype) -> Pass:
        """What one rank multiplies, as the choice of a method sees it; for a weight gradient the fprop, whose method it takes."""
        if self.op == "ag_gemm":
            fprop = Pass(GATHER, self.m, self.n // world, self.k, dtype, world)
        else:
            fprop = Pass(SCATTER, self.m, self.n, self.k // world, dtype, world)
        return fprop.dgrad if self.pass_ == "dgrad" else fprop


def check_divisible(what: str, size: int, world: int) -> None:
    """Raises ValueError where a size cannot be sharded."""
    if size < world or size % world:
        raise ValueError(
            f"{what}: {size} must be divisible by the {world} ranks; choose another size or number of ranks"
        )
