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

    def mine(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's shard of a full tensor, in the case's dtype, as a leaf."""
        return full.chunk(self.world, dim)[self.rank].to(self.dtype).contiguous().requires_grad_()

    def copy(self, full: torch.Tensor) -> torch.Tensor:
        """All of a full tensor, as every rank has it, in the case's dtype, as a leaf."""
        return full.to(self.dtype).requires_grad_()


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


def column(case: Case, rows: tuple[int, ...], k: int, n_shard: int, seed: int = 0, bias: bool = False) -> None:
    """all_gather_linear, forward and backward, against the unsharded product in fp64."""
    s, rest, w = rows[0] * case.world, rows[1:], n_shard * case.world
    x, weight = case.integers(s, *rest, k, seed=seed), case.integers(w, k, seed=seed + 1)
    dy, b = case.integers(s, *rest, w, seed=seed + 2), case.integers(w, seed=seed + 3)
    x_shard, w_shard, b_shard = case.mine(x, 0), case.mine(weight, 0), case.mine(b, 0) if bias else None
    poison(case)
    y = all_gather_linear(x_shard, w_shard, b_shard, group=case.group, config=case.config)
    y.backward(case.mine(dy, -1).detach())
    check_exact("y", y, x @ weight.t() + (b if bias else 0), -1, case)
    check_exact("dx", x_shard.grad, dy @ weight, 0, case)
    check_exact("dw", w_shard.grad, dy.flatten(0, -2).t() @ x.flatten(0, -2), 0, case)
    if b_shard is not None:
        check_exact("dbias", b_shard.grad, dy.flatten(0, -2).sum(0), 0, case)


def row(case: Case, rows: tuple[int, ...], k_shard: int, n: int, seed: int = 0, bias: bool = False) -> None:
    """linear_reduce_scatter, forward and backward, against the unsharded product in fp64."""
    s, rest, k = rows[0] * case.world, rows[1:], k_shard * case.world
    x, weight = case.integers(s, *rest, k, seed=seed), case.integers(n, k, seed=seed + 1)
    dy, b = case.integers(s, *rest, n, seed=seed + 2), case.integers(n, seed=seed + 3)
    x_shard, w_shard = case.mine(x, -1), case.mine(weight, 1)
    b_full = case.copy(b) if bias else None
    poison(case)
    y = linear_reduce_scatter(x_shard, w_shard, b_full, group=case.group, config=case.config)
    y.backward(case.mine(dy, 0).detach())
    check_exact("y", y, x @ weight.t() + (b if bias else 0), 0, case)
    check_exact("dx", x_shard.grad, dy @ weight, -1, case)
    check_exact("dw", w_shard.grad, dy.flatten(0, -2).t() @ x.flatten(0, -2), 1, case)
    if b_full is not None:
        check_exact("dbias", b_full.grad, case.mine(dy, 0).detach().double().flatten(0, -2).sum(0), None, case)


def to_heads(case: Case, rows: tuple[int, ...], k: int, n_shard: int, seed: int = 0, bias: bool = False) -> None:
    """linear_all_to_all, forward and backward, against the product in fp64.

    Each rank's dw is compared with what its rows add to the whole, and dbias with what its columns add: their sums over the
    ranks are then right, too.
    """
    s, rest, n = rows[0] * case.world, rows[1:], n_shard * case.world
    x, weight = case.integers(s, *rest, k, seed=seed), case.integers(n, k, seed=seed + 1)
    dy, b = case.integers(s, *rest, n, seed=seed + 2), case.integers(n, seed=seed + 3)
    x_shard, w, b_leaf = case.mine(x, 0), case.copy(weight), case.copy(b) if bias else None
    poison(case)
    y = linear_all_to_all(x_shard, w, b_leaf, group=case.group, config=case.config)
    y.backward(case.mine(dy, -1).detach())
    check_exact("y", y, x @ weight.t() + (b if bias else 0), -1, case)
    check_exact("dx", x_shard.grad, dy @ weight, 0, case)
    check_exact("dw", w.grad, _of_own_rows(dy, x, case), None, case)
    if b_leaf is not None:
        columns = torch.arange(n, device=case.device) // n_shard == case.rank
        check_exact("dbias", b_leaf.grad, dy.flatten(0, -2).sum(0) * columns, None, case)


def to_rows(case: Case, rows: tuple[int, ...], k_shard: int, n: int, seed: int = 0, bias: bool = False) -> None:
    """all_to_all_linear, forward and backward, against the product in fp64. dw, dbias: as for to_heads, of the own rows."""
    s, rest, k = rows[0] * case.world, rows[1:], k_shard * case.world
    x, weight = case.integers(s, *rest, k, seed=seed), case.integers(n, k, seed=seed + 1)
    dy, b = case.integers(s, *rest, n, seed=seed + 2), case.integers(n, seed=seed + 3)
    x_shard, w, b_leaf = case.mine(x, -1), case.copy(weight), case.copy(b) if bias else None
    poison(case)
    y = all_to_all_linear(x_shard, w, b_leaf, group=case.group, config=case.config)
    y.backward(case.mine(dy, 0).detach())
    check_exact("y", y, x @ weight.t() + (b if bias else 0), 0, case)
    check_exact("dx", x_shard.grad, dy @ weight, -1, case)
    check_exact("dw", w.grad, _of_own_rows(dy, x, case), None, case)
    if b_leaf is not None:
        check_exact("dbias", b_leaf.grad, dy.chunk(case.world)[case.rank].flatten(0, -2).sum(0), None, case)


def all_reduced_row(case: Case, rows: tuple[int, ...], k_shard: int, n: int, seed: int = 0, bias: bool = False) -> None:
    """linear_all_reduce, forward and backward, against the unsharded product in fp64. rows: of all ranks."""
    x, weight = (
        case.integers(*rows, k_shard * case.world, seed=seed),
        case.integers(n, k_shard * case.world, seed=seed + 1),
    )
    dy, b = case.integers(*rows, n, seed=seed + 2), case.integers(n, seed=seed + 3)
    x_shard, w_shard, b_leaf = case.mine(x, -1), case.mine(weight, 1), case.copy(b) if bias else None
    poison(case)
    y = linear_all_reduce(x_shard, w_shard, b_leaf, group=case.group, config=case.config)
    y.backward(dy.to(case.dtype))
    check_exact("y", y, x @ weight.t() + (b if bias else 0), None, case)
    check_exact("dx", x_shard.grad, dy @ weight, -1, case)
    check_exact("dw", w_shard.grad, dy.flatten(0, -2).t() @ x.flatten(0, -2), 1, case)
    if b_leaf is not None:
        check_exact("dbias", b_leaf.grad, dy.flatten(0, -2).sum(0), None, case)


def all_reduced_column(
    case: Case, rows: tuple[int, ...], k: int, n_shard: int, seed: int = 0, bias: bool = False
) -> None:
    """linear_dgrad_all_reduce, likewise."""
    x, weight = case.integers(*rows, k, seed=seed), case.integers(n_shard * case.world, k, seed=seed + 1)
    dy, b = (
        case.integers(*rows, n_shard * case.world, seed=seed + 2),
        case.integers(n_shard * case.world, seed=seed + 3),
    )
    x_leaf, w_shard, b_shard = case.copy(x), case.mine(weight, 0), case.mine(b, 0) if bias else None
    poison(case)
    y = linear_dgrad_all_reduce(x_leaf, w_shard, b_shard, group=case.group, config=case.config)
    y.backward(case.mine(dy, -1).detach())
    check_exact("y", y, x @ weight.t() + (b if bias else 0), -1, case)
    check_exact("dx", x_leaf.grad, dy @ weight, None, case)
    check_exact("dw", w_shard.grad, dy.flatten(0, -2).t() @ x.flatten(0, -2), 0, case)
    if b_shard is not None:
        check_exact("dbias", b_shard.grad, dy.flatten(0, -2).sum(0), 0, case)


def _of_own_rows(dy: torch.Tensor, x: torch.Tensor, case: Case) -> torch.Tensor:
    """This rank's part of the weight gradient dy.T @ x, whose sum over the ranks is all of it."""
    dy_rows, x_rows = (t.chunk(case.world)[case.rank].flatten(0, -2) for t in (dy, x))
    return dy_rows.t() @ x_rows


OPERATORS: dict[str, Callable[..., None]] = {"column": column, "row": row, "to_heads": to_heads, "to_rows": to_rows}
ALL_REDUCING: dict[str, Callable[..., None]] = {"column": all_reduced_column, "row": all_reduced_row}


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
