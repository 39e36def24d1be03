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

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...schedule.order import GEMM_A2A
from .cases import EXCHANGES, Case
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
    """Normal random numbers, different on every rank and for every seed. Collective."""
    generator = torch.Generator(world.device).manual_seed(1000 * seed + world.rank)

    def normal(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=dtype, device=world.device, generator=generator)

    m, n, k, shards = case.m, case.n, case.k, world.size
    if case.op in EXCHANGES:
        return _of_exchange(case, world, dtype, seed, normal)
    column = case.op == "ag_gemm"
    weight = normal(n // shards, k) if column else normal(n, k // shards)
    if case.kind == "gather":
        left = normal(m // shards, k if column else n)
        return Operands(left, weight.t() if column else weight, gathered(left, world))
    left, right = (normal(m, n // shards), weight) if column else (normal(m, k // shards), weight.t())
    return Operands(left, right, normal(m, right.shape[1]))


def _of_exchange(
    case: Case, world: World, dtype: torch.dtype, seed: int, normal: Callable[[int, int], torch.Tensor]
) -> Operands:
    m, n, k, shards = case.m, case.n, case.k, world.size
    same = torch.Generator(world.device).manual_seed(seed)
    weight = torch.randn(n, k, dtype=dtype, device=world.device, generator=same)
    right = weight.t() if case.pass_ == "fprop" else weight
    if case.kind == GEMM_A2A:
        left = normal(m // shards, right.shape[0])
        return Operands(left, right, gathered(left, world))
    left = normal(m, right.shape[0] // shards)
    return Operands(left, right, exchanged(left, world))


def exchanged(columns: torch.Tensor, world: World) -> torch.Tensor:
    """[M, C/W] of every rank -> this rank's rows [M/W, C]."""
    return side_by_side(world.size, all_to_all(columns, world.group))


def all_to_all(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[M, C], W blocks of rows -> the same of all ranks' blocks for this one."""
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=group)
    return received


def side_by_side(ranks: int, blocks: torch.Tensor) -> torch.Tensor:
    """W blocks of rows [M, C/W], one after the other, side by side: [M/W, C]."""
    return blocks.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1)


def gathered(shard: torch.Tensor, world: World) -> torch.Tensor:
    """[M/W, C] of every rank -> [M, C]."""
    whole = shard.new_empty(shard.shape[0] * world.size, shard.shape[1])
    dist.all_gather_into_tensor(whole, shard, group=world.group)
    return whole
