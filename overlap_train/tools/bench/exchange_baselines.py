"""What the operators of Ulysses are compared with, by name:

    sequence    one cuBLAS GEMM, NCCL's (or gloo's) all-to-all, and the copy between that puts each rank's part together
    three_gemms the asynchronous scheme: three GEMMs, each exchange under the GEMM of the next (of q under k's, of k under v's)
    gemm, comm  each part of the work alone; only timed

All take the operands of their kind of pass (measure/operands.py).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...planning.schedule import A2A_GEMM, GEMM_A2A
from ..measure.cases import Case
from ..measure.operands import Operands
from ..measure.runs import Run, into_target
from ..measure.world import World


def exchange_baselines(case: Case, world: World, like: Operands) -> dict[str, Run]:
    """The baselines of a pass of linear_all_to_all or all_to_all_linear; `like` is one of its input sets."""
    if case.kind == GEMM_A2A:
        return _gemm_a2a(world, like)
    if case.kind == A2A_GEMM:
        return _a2a_gemm(world)
    return _weight_of_x(world) if case.op == A2A_GEMM else _weight_of_dy()


def _gemm_a2a(world: World, like: Operands) -> dict[str, Run]:
    """y [M, F/W] = this rank's columns of what all ranks' left @ right give"""
    blocks = like.left.new_zeros(like.whole.shape[0], like.right.shape[1] // world.size)

    def sent(y: torch.Tensor) -> torch.Tensor:
        """[M/W, F] as blocks for the ranks, one after the other."""
        return y.unflatten(1, (world.size, -1)).transpose(0, 1).contiguous().flatten(0, 1)

    weights = ThreeWeights(world.size)

    def three_gemms(o: Operands) -> torch.Tensor:
        y, works = o.left.new_empty(o.whole.shape[0], o.right.shape[1] // world.size), []
        for right, (first, last) in zip(weights.of(o.right), _thirds(y.shape[1]), strict=True):
            part = sent(o.left @ right)
            received = torch.empty_like(part)
            work = dist.all_to_all_single(received, part, group=world.group, async_op=True)
            works.append((work, received, part, slice(first, last)))
        for work, received, _, where in works:
            work.wait()
            y[:, where] = received
        return y

    return {
        "sequence": lambda o: _exchange(sent(o.left @ o.right), world),
        "three_gemms": three_gemms,
        "gemm": lambda o: o.left @ o.right,
        "comm": lambda o: _exchange(blocks, world),
    }


def _a2a_gemm(world: World) -> dict[str, Run]:
    """y [M/W, F] = what all ranks have of this rank's rows @ right"""

    def received(o: Operands) -> torch.Tensor:
        return _side_by_side(_exchange(o.left, world), world)

    return {
        "sequence": lambda o: received(o) @ o.right,
        "gemm": lambda o: o.whole @ o.right,
        "comm": lambda o: _exchange(o.left, world),
    }


def _weight_of_x(world: World) -> dict[str, Run]:
    """target [N, K] += right.T @ exchanged left: all_to_all_linear's weight gradient, x sent again"""
    return {
        "sequence": lambda o: into_target(o, o.right, _side_by_side(_exchange(o.left, world), world)),
        "gemm": lambda o: into_target(o, o.right, o.whole),
        "comm": lambda o: _exchange(o.left, world),
    }


def _weight_of_dy() -> dict[str, Run]:
    """target [N, K] += whole.T @ right: linear_all_to_all's weight gradient, with the dy received for dgrad"""

    def gemm(o: Operands) -> torch.Tensor:
        return into_target(o, o.whole, o.right)

    return {"sequence": gemm, "gemm": gemm, "comm": lambda o: o.whole}


def _exchange(blocks: torch.Tensor, world: World) -> torch.Tensor:
    """[M, C], W blocks of rows -> the same of all ranks' blocks for this one."""
    blocks = blocks.contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=world.group)
    return received


def _side_by_side(received: torch.Tensor, world: World) -> torch.Tensor:
    """[M, C/W], block s from rank s -> [M/W, C]."""
    return received.unflatten(0, (world.size, -1)).transpose(0, 1).flatten(1)


class ThreeWeights:
    """The weights of q, k and v as three matrices, cut when a weight is first seen: in a model they are three parameters.

    Of the columns of each rank two thirds are q, a sixth k and a sixth v, as in Llama-3 8B.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._seen: dict[
            int, tuple[torch.Tensor, list[torch.Tensor]]
        ] = {}  # by id; the weight, so that it stays its id

    def of(self, right: torch.Tensor) -> list[torch.Tensor]:
        """Of right [K, F], as [K, a part of F] each."""
        if id(right) not in self._seen:
            rows = right.t().unflatten(0, (self._ranks, -1))
            parts = [rows[:, first:last].flatten(0, 1).t() for first, last in _thirds(rows.shape[1])]
            self._seen[id(right)] = right, parts
        return self._seen[id(right)][1]


def _thirds(columns: int) -> tuple[tuple[int, int], ...]:
    """Where q, k and v are among a rank's columns."""
    q = columns * 2 // 3
    k = q + (columns - q) // 2
    return (0, q), (q, k), (k, columns)
