"""Random inputs of one pass, as this rank holds them.

W ranks, weight [N, K], x [M, K], dy [M, N]. Each kind of pass (Case.kind) has its matrices in the layout of training:

    gather   left [M/W, C]  right [C, F] view   whole [M, C], left of all ranks
             y [M, F] = whole @ right
    scatter  left [M, C]    right [C, F] view   whole [M, F], which a reduce-scatter is timed on
             y [M/W, F] = this rank's rows of the sum over ranks of left @ right
    gemm_a2a left [M/W, C]  right [C, F] view, the same on every rank   whole [M, C], left of all ranks
             y [M, F/W] = this rank's columns of whole @ right
    a2a_gemm left [M, C/W]  right [C, F] view, the same on every rank   whole [M/W, C], this rank's rows of all columns
             y [M/W, F] = whole @ right
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...schedule.order import A2A_GEMM, EXCHANGES, SCATTER
from .cases import Case
from .world import World


@dataclass(frozen=True)
class Operands:
    """One input set."""

    left: torch.Tensor
    right: torch.Tensor
    whole: torch.Tensor

    @property
    def nbytes(self) -> int:
        """The bytes that every method reads, at the least."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.left, self.right))


def make_operands(case: Case, world: World, dtype: torch.dtype, seed: int) -> Operands:
    """Normal random numbers, different for every seed and on every rank but for what ranks share. Collective."""
    own = torch.Generator(world.device).manual_seed(1000 * seed + world.rank)
    shared = torch.Generator(world.device).manual_seed(seed)

    def normal(rows: int, columns: int, generator: torch.Generator = own) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=dtype, device=world.device, generator=generator)

    m, n, k, ranks = case.m, case.n, case.k, world.size
    if case.op in EXCHANGES:
        weight = normal(n, k, shared)
    else:
        weight = normal(n // ranks, k) if case.op == "ag_gemm" else normal(n, k // ranks)
    right = weight.t() if case.pass_ == "fprop" else weight
    if case.kind == SCATTER:
        return Operands(normal(m, len(right)), right, normal(m, right.shape[1]))
    if case.kind == A2A_GEMM:
        left = normal(m, len(right) // ranks)
        return Operands(left, right, side_by_side(ranks, world.exchange(left)))
    left = normal(m // ranks, len(right))
    return Operands(left, right, world.gather(left))


def side_by_side(ranks: int, blocks: torch.Tensor) -> torch.Tensor:
    """W blocks of rows [M, C/W], one after the other, side by side: [M/W, C]."""
    return blocks.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1)
