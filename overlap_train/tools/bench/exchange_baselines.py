"""What the operators of Ulysses are compared with, by name:

    sequence    one cuBLAS GEMM, NCCL's (or gloo's) all-to-all, and the copy between that puts each rank's part together
    three_gemms the asynchronous scheme: three GEMMs, each exchange under the GEMM of the next (of q under k's, of k under v's).
                Gives q, k and v as three tensors, as the models do that work like this
    gemm, comm  each part of the work alone; only timed

All take the operands of their kind of pass (measure/operands.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...schedule.order import GEMM_A2A
from ..measure.cases import Case
from ..measure.models import MODELS
from ..measure.operands import Operands, all_to_all, exchanged
from ..measure.runs import Run
from ..measure.world import World


def exchange_baselines(case: Case, world: World, sets: Sequence[Operands]) -> dict[str, Run]:
    """The baselines of a pass of linear_all_to_all or all_to_all_linear; `sets` are all inputs that they will get."""
    return _gemm_a2a(world, sets, shares_of(case)) if case.kind == GEMM_A2A else _a2a_gemm(world)


def _gemm_a2a(world: World, sets: Sequence[Operands], shares: tuple[int, int, int]) -> dict[str, Run]:
    """y [M, F/W] = this rank's columns of what all ranks' left @ right give"""
    like = sets[0]
    blocks = like.left.new_zeros(like.whole.shape[0], like.right.shape[1] // world.size)
    weights = {id(o): three_weights(o.right, world.size, shares) for o in sets}  # cut before anything is timed

    def three_gemms(o: Operands) -> tuple[torch.Tensor, ...]:
        parts, works = [], []
        for right in weights[id(o)]:
            part = blocks_for(world.size, o.left @ right)
            parts.append(torch.empty_like(part))
            works.append((dist.all_to_all_single(parts[-1], part, group=world.group, async_op=True), part))
        for work, _ in works:
            work.wait()
        return tuple(parts)

    return {
        "sequence": lambda o: all_to_all(blocks_for(world.size, o.left @ o.right), world.group),
        "three_gemms": three_gemms,
        "gemm": lambda o: o.left @ o.right,
        "comm": lambda o: all_to_all(blocks, world.group),
    }


def _a2a_gemm(world: World) -> dict[str, Run]:
    """y [M/W, F] = what all ranks have of this rank's rows @ right"""
    return {
        "sequence": lambda o: exchanged(o.left, world) @ o.right,
        "gemm": lambda o: o.whole @ o.right,
        "comm": lambda o: all_to_all(o.left, world.group),
    }


def blocks_for(ranks: int, y: torch.Tensor) -> torch.Tensor:
    """y [M/W, F] as W blocks of rows [M, F/W], one after the other: block d has the columns for rank d."""
    return y.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous().flatten(0, 1)


def three_weights(right: torch.Tensor, ranks: int, shares: tuple[int, int, int]) -> list[torch.Tensor]:
    """right [K, F] as the weights of q, k and v, [K, a part of F] each, contiguous as in a model with three parameters.

    Each rank's columns are cut. shares: of q, k and v (shares_of).
    """
    rows = right.t().unflatten(0, (ranks, -1))
    return [rows[:, first:last].flatten(0, 1).t() for first, last in three_parts(rows.shape[1], shares)]


def shares_of(case: Case) -> tuple[int, int, int]:
    """What q, k and v have of the columns: heads of the model in a QKV projection.

    Elsewhere they are equal: Table 6 has one of three equal projections, and in an output projection's gradient nothing is q.
    If q had two thirds, the scheme would hide less where the exchange takes longer than half the GEMM (at equal times 1.67
    instead of 1.33 GEMMs), and more elsewhere.
    """
    model = MODELS.get(case.model) if case.op == GEMM_A2A else None
    return (1, 1, 1) if model is None else (model.num_attention_heads, model.num_query_groups, model.num_query_groups)


def three_parts(columns: int, shares: tuple[int, int, int]) -> tuple[tuple[int, int], ...]:
    """Where q, k and v are among a rank's columns: at whole heads of 128, where there are so many columns. k and v are alike.

    Elsewhere rows of the product would not begin at 16 bytes: 683 of 4096 columns leave cuBLAS only kernels without TMA.
    """
    head = 128 if columns >= 6 * 128 else 1
    k = max(1, round(columns * shares[1] / sum(shares) / head)) * head
    return (0, columns - 2 * k), (columns - 2 * k, columns - k), (columns - k, columns)
