"""Cases that CPU processes and GPUs share: each runs one operator on every rank of a group and compares it exactly.

Inputs are small integers and mostly zero, so that every product, partial sum and rounding is exact in every dtype: any
difference is a protocol or indexing error, never rounding. Slots are poisoned with NaN first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from overlap_train import (
    OverlapConfig,
    all_gather_linear,
    all_to_all_linear,
    linear_all_reduce,
    linear_all_to_all,
    linear_dgrad_all_reduce,
    linear_reduce_scatter,
)
from overlap_train.group.registry import domain_of
from overlap_train.group.slots import BARRIER

# Sizes no tile divides, a single row per rank, a single column, several leading dimensions, several tiles.
SHAPES = {
    "even": ((8, 2), 64, 32),
    "one row a rank": ((1, 1), 48, 40),
    "odd": ((3, 5), 37, 29),
    "one feature": ((5, 1), 1, 1),
    "three leading": ((2, 3, 2), 33, 17),
}


@dataclass(frozen=True)
class Case:
    """Where and how to run: rows_per_rank [s/W, b, ...], features of the unsharded contraction and output per rank."""

    group: dist.ProcessGroup
    device: torch.device
    config: OverlapConfig
    dtype: torch.dtype = torch.float32

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world(self) -> int:
        return dist.get_world_size(self.group)

    def integers(self, *shape: int, seed: int) -> torch.Tensor:
        """Values in {-1, 0, 1}, at most 64 of them nonzero along any summed axis on average: sums stay below 256."""
        generator = torch.Generator(self.device).manual_seed(seed)  # the host takes 20 s for the largest of eight ranks
        values = torch.randint(-1, 2, shape, generator=generator, device=self.device).double()
        keep = torch.rand(shape, generator=generator, device=self.device) < min(1.0, 64 / max(shape[-1], 1))
        return values * keep

    def mine(self, full: torch.Tensor, dim: int | None) -> torch.Tensor:
        """This rank's shard of a full tensor, or all of it without a dim, in the case's dtype, as a leaf."""
        shard = full if dim is None else full.chunk(self.world, dim)[self.rank]
        return shard.to(self.dtype).contiguous().requires_grad_()

    def only_mine(self, full: torch.Tensor, dim: int | None) -> torch.Tensor:
        """A full tensor with zeros where other ranks have their shards."""
        if dim is None:
            return full
        only = torch.zeros_like(full)
        only.chunk(self.world, dim)[self.rank].copy_(full.chunk(self.world, dim)[self.rank])
        return only


def poison(case: Case) -> None:
    """NaN over every slot of this rank; the ranks wait for each other before and after."""
    domain = domain_of(case.group, case.config, case.device)
    dist.barrier(case.group)
    if domain.heap is not None:
        blocks = slice(domain.layout.offset(0), domain.layout.offset(BARRIER))
        domain.heap.view(case.rank)[blocks].fill_(255)  # all ones is NaN in every floating dtype
    if case.device.type == "cuda":
        torch.cuda.synchronize(case.device)
    dist.barrier(case.group)


def cut_into(chunks_of: Callable[[int], int]) -> dict[str, Callable[..., int]]:
    """Names, and what takes their place where plans shall cut blocks of m_shard rows into chunks_of(m_shard) chunks."""

    def count(m_shard: int, *_: Any, **__: Any) -> int:
        return chunks_of(m_shard)

    return {"overlap_train.select.tiles.chunk_count": count}


def check_exact(name: str, actual: torch.Tensor | None, full: torch.Tensor, dim: int | None, case: Case) -> None:
    """`actual` is this rank's shard (along `dim`) of `full`, rounded to the dtype of actual, bit for bit."""
    assert actual is not None, f"{name} is missing"
    if case.config.fp8 != "off":  # a scale is no power of two, so that a sum of zero may be a millionth
        actual = actual.round()
    expected = (full if dim is None else full.chunk(case.world, dim)[case.rank]).to(actual.dtype)
    assert actual.shape == expected.shape, f"{name}: {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    wrong = (actual != expected).sum().item()
    assert wrong == 0, f"{name} on rank {case.rank}: {wrong} of {actual.numel()} elements differ"


@dataclass(frozen=True)
class ExactLinear:
    """Runs one operator forward and backward, and compares y, dx, dw and dbias with the unsharded product in fp64.

    x, w, bias, y: the dimension along which ranks have shards of it; None where every rank has all of it. The gradient of a w or
    bias that every rank has is only what this rank's rows add to dw, and what its part of y adds to dbias: their sums over the
    ranks are then right, too.
    """

    operator: Callable[..., torch.Tensor]
    x: int | None
    w: int | None
    bias: int | None
    y: int | None

    def __call__(self, case: Case, rows: tuple[int, ...], k: int, n: int, seed: int = 0, bias: bool = False) -> None:
        """rows, k, n: of x [rows, k] and y [rows, n], each as long as one rank's shard where x or y is sharded along it."""
        m = rows[0] * (case.world if 0 in (self.x, self.y) else 1)
        k, n = k * (case.world if self.x == -1 else 1), n * (case.world if self.y == -1 else 1)
        x, w = case.integers(m, *rows[1:], k, seed=seed), case.integers(n, k, seed=seed + 1)
        dy, b = case.integers(m, *rows[1:], n, seed=seed + 2), case.integers(n, seed=seed + 3)
        x_shard, w_shard = case.mine(x, self.x), case.mine(w, self.w)
        b_shard = case.mine(b, self.bias) if bias else None
        poison(case)
        y = self.operator(x_shard, w_shard, b_shard, group=case.group, config=case.config)
        y.backward(case.mine(dy, self.y).detach())
        check_exact("y", y, x @ w.t() + (b if bias else 0), self.y, case)
        check_exact("dx", x_shard.grad, dy @ w, self.x, case)
        of_dw = case.only_mine(dy, 0) if self.w is None else dy
        check_exact("dw", w_shard.grad, of_dw.flatten(0, -2).t() @ x.flatten(0, -2), self.w, case)
        if b_shard is not None:
            of_dbias = case.only_mine(dy, self.y) if self.bias is None else dy
            check_exact("dbias", b_shard.grad, of_dbias.flatten(0, -2).sum(0), self.bias, case)


column = ExactLinear(all_gather_linear, x=0, w=0, bias=0, y=-1)
row = ExactLinear(linear_reduce_scatter, x=-1, w=1, bias=None, y=0)
to_heads = ExactLinear(linear_all_to_all, x=0, w=None, bias=None, y=-1)
to_rows = ExactLinear(all_to_all_linear, x=-1, w=None, bias=None, y=0)
OPERATORS = {"column": column, "row": row, "to_heads": to_heads, "to_rows": to_rows}
PAIRS = {"tensor": (all_gather_linear, linear_reduce_scatter), "ulysses": (linear_all_to_all, all_to_all_linear)}
ALL_REDUCING = {
    "column": ExactLinear(linear_dgrad_all_reduce, x=None, w=0, bias=0, y=-1),
    "row": ExactLinear(linear_all_reduce, x=-1, w=1, bias=None, y=None),
}


def same_bits(case: Case, rows: int, k: int = 512, n: int = 1024) -> None:
    """What both operators all-reduce of random numbers, twice: each rank and run has the same bits."""
    generator, runs = torch.Generator().manual_seed(case.rank), []
    a, row, column, x = (
        torch.randn(shape, generator=generator).to(case.device, case.dtype).requires_grad_()
        for shape in ((rows, k), (n, k), (k, n), (rows, n))
    )
    for _ in range(2):
        y = linear_all_reduce(a, row, group=case.group, config=case.config)
        hidden = linear_dgrad_all_reduce(x, column, group=case.group, config=case.config)
        dx, _ = torch.autograd.grad(hidden, (x, column), a)
        runs.append(torch.stack((y.detach(), dx)).view(torch.uint8))
    of_ranks = [torch.empty_like(runs[0]) for _ in range(case.world)]
    dist.all_gather(of_ranks, runs[0], group=case.group)
    assert all(torch.equal(other, runs[0]) for other in (*of_ranks, runs[1]))


def rounding_bound(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, partials: int) -> torch.Tensor:
    """Elementwise bound on |computed - exact| of a [M, K] @ b [K, N] split into `partials` partial sums.

    Inputs are exact. Each product is accumulated in fp32: at most (K + partials) additions of relative error eps32, in any
    order, on magnitudes of at most |a| @ |b|. Each partial and the result are rounded once to `dtype`: eps/2 each.
    """
    magnitude = a.double().abs() @ b.double().abs()
    eps, eps32 = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    return magnitude * (eps + (a.shape[1] + partials) * eps32)


def bits_of_sums(rank: int, world: int, config: OverlapConfig) -> list[bytes]:
    """y, dx and dw of both operators that add, of random numbers."""
    found: list[torch.Tensor] = []
    for operator, features in ((linear_reduce_scatter, 40), (all_to_all_linear, 40 * world)):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(6 * world, 40, generator=generator).requires_grad_()
        w = torch.randn(24, features, generator=generator).requires_grad_()
        y = operator(x, w, group=dist.group.WORLD, config=config)
        found += [y, *torch.autograd.grad(y, (x, w), torch.ones_like(y))]
    return [t.detach().numpy().tobytes() for t in found]


def error_of_a_sum(rank: int, world: int, config: OverlapConfig) -> float:
    """The largest error of a random bf16 reduction, as a fraction of the bound that its rounding allows."""
    generator = torch.Generator().manual_seed(1)
    x, w = torch.randn(8 * world, 96 * world, generator=generator), torch.randn(40, 96 * world, generator=generator)
    x, w = x.bfloat16(), w.bfloat16()
    x_shard_k, w_shard_k = (t.chunk(world, 1)[rank].contiguous() for t in (x, w))
    y = linear_reduce_scatter(x_shard_k, w_shard_k, group=dist.group.WORLD, config=config)
    exact = (x.double() @ w.double().t()).chunk(world)[rank]
    bound = rounding_bound(x, w.t(), torch.bfloat16, world).chunk(world)[rank]
    return float(((y.double() - exact).abs() / bound).max())
