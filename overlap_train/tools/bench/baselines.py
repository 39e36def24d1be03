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
from ..measure.runs import Run
from ..measure.world import World
from .async_tp import async_all_gather_matmul, async_matmul_reduce_scatter
from .exchange_baselines import exchange_baselines


def baselines_of(case: Case, world: World, sets: Sequence[Operands]) -> dict[str, Run]:
    """The baselines of a pass; `sets` are all inputs that they will get."""
    if case.op in EXCHANGES:
        return exchange_baselines(case, world, sets)
    return _scatter(world) if case.kind == "scatter" else _gather(world, sets[0])


def _gather(world: World, like: Operands) -> dict[str, Run]:
    """y [M, F] = all_gather(left) @ right"""
    buffer = torch.empty_like(like.whole)

    def comm(o: Operands) -> torch.Tensor:
        dist.all_gather_into_tensor(buffer, o.left, group=world.group)
        return buffer

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
