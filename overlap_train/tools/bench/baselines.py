"""What an operator is compared with, by name:

    sequence   NCCL (or gloo) and cuBLAS, one after the other
    async_tp   PyTorch's async-TP
    gemm, comm each half of the work alone; only timed

All take the operands of their kind of pass (measure/operands.py). Buffers that a framework would reuse are reused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..measure.cases import EXCHANGES, Case
from ..measure.operands import Operands
from ..measure.runs import Run, into_target
from ..measure.world import World
from .async_tp import async_all_gather_matmul, async_matmul_reduce_scatter
from .exchange_baselines import exchange_baselines


def baselines_of(case: Case, world: World, sets: Sequence[Operands]) -> dict[str, Run]:
    """The baselines of a pass; `sets` are all inputs that they will get."""
    like = sets[0]
    if case.op in EXCHANGES:
        return exchange_baselines(case, world, sets)
    if case.kind == "scatter":
        return _scatter(world)
    if case.kind == "gather":
        return _gather(world, like)
    return _column_weight(world, like) if case.op == "ag_gemm" else _row_weight()


def _gather(world: World, like: Operands) -> dict[str, Run]:
    """y [M, F] = all_gather(left) @ right"""
    comm = _gather_into(torch.empty_like(like.whole), world)
    return {
        "sequence": lambda o: comm(o) @ o.right,
        "async_tp": lambda o: async_all_gather_matmul(o.left, o.right, world.group)[1],
        "gemm": lambda o: o.whole @ o.right,
        "comm": comm,
    }


def _scatter(world: World) -> dict[str, Run]:
    """y [M/W, F] = reduce_scatter(left @ right)"""

    def scattered(partial: torch.Tensor) -> torch.Tensor:
        y = partial.new_empty(partial.shape[0] // world.size, partial.shape[1])
        dist.reduce_scatter_tensor(y, partial, group=world.group)
        return y

    return {
        "sequence": lambda o: scattered(o.left @ o.right),
        "async_tp": lambda o: async_matmul_reduce_scatter(o.left, o.right, world.group),
        "gemm": lambda o: o.left @ o.right,
        "comm": lambda o: scattered(o.whole),
    }


def _column_weight(world: World, like: Operands) -> dict[str, Run]:
    """target [N/W, K] += right.T @ all_gather(left): the column linear's weight gradient, x gathered again"""
    comm = _gather_into(torch.empty_like(like.whole), world)

    def async_tp(o: Operands) -> torch.Tensor:
        """Async-TP gathers along the first dimension of x.T [K, M], of which each rank keeps K/W rows."""
        x_shard_k = o.whole.chunk(world.size, dim=1)[world.rank]
        _, dw_t = async_all_gather_matmul(x_shard_k.t().contiguous(), o.right, world.group)
        assert o.target is not None
        return o.target.add_(dw_t.t())

    return {
        "sequence": lambda o: into_target(o, o.right, comm(o)),
        "async_tp": async_tp,
        "gemm": lambda o: into_target(o, o.right, o.whole),
        "comm": comm,
    }


def _row_weight() -> dict[str, Run]:
    """target [N, K/W] += whole.T @ right: the row linear's weight gradient, with the dy gathered for dgrad"""

    def gemm(o: Operands) -> torch.Tensor:
        return into_target(o, o.whole, o.right)

    return {"sequence": gemm, "async_tp": gemm, "gemm": gemm, "comm": lambda o: o.whole}


def _gather_into(buffer: torch.Tensor, world: World) -> Run:
    def comm(o: Operands) -> torch.Tensor:
        dist.all_gather_into_tensor(buffer, o.left, group=world.group)
        return buffer

    return comm
