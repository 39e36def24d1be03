"""What is measured: one pass of one linear, and the sizes that models give to linears and layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...config import OverlapConfig
from ...group.slots import SLOTS
from ...schedule.kinds import Kind
from ...select.method import Pass
from .models import MODELS

# By the names of operators in records: what a forward pass does, of an operator that all-reduces were its rows sharded.
OPERATORS = {
    "ag_gemm": Kind.AG_GEMM,
    "gemm_rs": Kind.GEMM_RS,
    "gemm_a2a": Kind.GEMM_A2A,
    "a2a_gemm": Kind.A2A_GEMM,
    "dgrad_ar": Kind.AG_GEMM,
    "gemm_ar": Kind.GEMM_RS,
}
OPS, EXCHANGES, ALL_REDUCES = ("ag_gemm", "gemm_rs"), ("gemm_a2a", "a2a_gemm"), ("dgrad_ar", "gemm_ar")
PASSES = ("fprop", "dgrad")


@dataclass(frozen=True)
class Case:
    """A pass of one operator: x [M, K], weight [N, K], global sizes, the same in every pass.

    op: ag_gemm is all_gather_linear, gemm_rs linear_reduce_scatter, gemm_a2a linear_all_to_all, a2a_gemm all_to_all_linear,
    dgrad_ar linear_dgrad_all_reduce, whose dgrad has the weight gradient with it, gemm_ar linear_all_reduce.
    model: what the printed tables call it.
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
    def kind(self) -> Kind:
        """What the pass does: gather (AG + GEMM), scatter (GEMM + RS), gemm_a2a or a2a_gemm."""
        fprop = OPERATORS[self.op]
        return fprop if self.pass_ == "fprop" else fprop.dgrad.engine

    @property
    def all_reduces(self) -> bool:
        return self.op in ALL_REDUCES

    @property
    def has_wgrad(self) -> bool:
        """Whether the weight gradient is part of the pass: the gather of an all-reduce's sums runs under it."""
        return self.op == "dgrad_ar"

    def flops(self, world: int) -> float:
        """Floating-point operations of one rank's GEMMs; the same in both passes."""
        return 2 * (1 + self.has_wgrad) * self.m * self.n * self.k / world

    def slot_bytes(self, world: int, dtype: torch.dtype, fp8: str = "off") -> int:
        """Bytes of what one rank receives: M rows of the features that are sent. Of an exchange a rank's part of them, and of a
        long one the first part of the rows."""
        rows = self.m + self.all_reduces * (-self.m % world)
        received = rows * (self.k if OPERATORS[self.op].receives else self.n) * dtype.itemsize
        part = (OverlapConfig().exchange_mib << 20) // SLOTS
        if self.kind.exchanges:
            return min(received // world, part)
        return max(received, self.planned(world, dtype, fp8).received_bytes)  # with scales of blocks it may be more

    def planned(self, world: int, dtype: torch.dtype, fp8: str = "off") -> Pass:
        """What one rank multiplies, as the choice of a method sees it. dtype: of the result; fp8: as in OverlapConfig."""
        kind = OPERATORS[self.op]
        n = self.n // world if kind.gathers else self.n
        k = self.k // world if kind.reduces else self.k
        fprop = Pass(kind, self.m, n, k, dtype, world, fp8 != "off", fp8 == "blockwise")
        return fprop.dgrad if self.pass_ == "dgrad" else fprop


def check_divisible(what: str, size: int, world: int) -> None:
    """Raises ValueError where a size cannot be sharded."""
    if size < world or size % world:
        raise ValueError(
            f"{what}: {size} must be divisible by the {world} ranks; choose another size or number of ranks"
        )


def cases_of(
    model: str, op: str, weight: tuple[int, int], m: int, world: int, what: str, rows: str = "--seq"
) -> list[Case]:
    """Both passes of a linear by its whole weight [N, K], of one that all-reduces the pass that does. what, rows: the arguments
    that name the weight and M, for messages.

    Raises:
        ValueError: a size cannot be shared by the ranks.
    """
    n, k = weight
    found = [Case(model, op, pass_, m, n, k) for pass_ in PASSES]
    if op in ALL_REDUCES:
        found = [case for case in found if case.kind.reduces]
    else:
        check_divisible(rows, m, world)
    check_divisible(f"{what}: features", n if op in ("ag_gemm", "gemm_a2a", "dgrad_ar") else k, world)
    return found


# Layer by name: the weights [N, K] of a column- and of a row-parallel linear, global sizes. What a model computes between the two
# is left out.
LAYERS = {
    f"{name}-{half}": (model.linears[column], model.linears[row])
    for name, model in MODELS.items()
    for half, column, row in (("mlp", "fc1", "fc2"), ("attn", "qkv", "proj"))
}
