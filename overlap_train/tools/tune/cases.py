"""Which passes are measured: those of both kinds of linear that choose a method. Weight gradients gather as their linear does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...planning.schedule import A2A_GEMM, GEMM_A2A
from ...ulysses.parts import cut
from ..measure.cases import OPS, Case, check_divisible
from ..measure.models import MODELS

COLUMN, ROW = OPS
OP_OF = {"qkv": COLUMN, "proj": ROW, "fc1": COLUMN, "fc2": ROW}
Sizes = tuple[int, int]


def model_cases(model: str, rows: Iterable[int], ranks: int) -> list[Case]:
    """fprop and dgrad of a model's linears for each M of `rows`, largest first.

    Raises:
        ValueError: a size cannot be sharded over the ranks.
    """
    linears = MODELS[model].linears.items()
    return [
        case
        for m in sorted(set(rows), reverse=True)
        for slot, weight in linears
        for case in _passes(slot, OP_OF[slot], m, weight, f"--model {model}: {slot}", ranks)
    ]


def ulysses_cases(model: str, rows: Iterable[int], ranks: int, limit_mib: int) -> list[Case]:
    """fprop and dgrad of the projections of a model's attention under Ulysses; of a long sequence the first part.

    Raises:
        ValueError: a size cannot be shared by the ranks.
    """
    linears, found = MODELS[model].linears, []
    for m in sorted(set(rows), reverse=True):
        for slot, op in (("qkv", GEMM_A2A), ("proj", A2A_GEMM)):
            (n, k), sent = linears[slot], 0 if op == GEMM_A2A else 1
            check_divisible("--seq", m, ranks)
            check_divisible(f"--model {model}: {slot}: features", linears[slot][sent], ranks)
            ((_, positions), *_) = cut(m // ranks, linears[slot][sent] * 2, limit_mib)  # of two bytes each
            found += [Case(slot, op, pass_, positions * ranks, n, k) for pass_ in ("fprop", "dgrad")]
    return found


def weight_cases(columns: Sequence[Sizes], rows: Sequence[Sizes], ms: Iterable[int], ranks: int) -> list[Case]:
    """The same of single linears by their whole weights [N, K], column-parallel (sharded over N) and row-parallel (over K).

    Raises:
        ValueError: a size cannot be sharded over the ranks.
    """
    return [
        case
        for m in ms
        for kind, op, weights in (("column", COLUMN, columns), ("row", ROW, rows))
        for n, k in weights
        for case in _passes(kind, op, m, (n, k), f"--{kind} {n},{k}", ranks)
    ]


def one_a_bucket(cases: Iterable[Case], ranks: int) -> list[Case]:
    """The first of each bucket, in which a winner counts for all; largest M first."""
    found: dict[Any, Case] = {}
    for case in sorted(cases, key=lambda case: -case.m):
        found.setdefault(case.planned(ranks, torch.float32).bucket, case)
    return list(found.values())


def _passes(slot: str, op: str, m: int, weight: Sizes, what: str, ranks: int) -> list[Case]:
    check_divisible("--seq", m, ranks)
    check_divisible(f"{what}: features", weight[0] if op == COLUMN else weight[1], ranks)
    return [Case(slot, op, pass_, m, *weight) for pass_ in ("fprop", "dgrad")]
