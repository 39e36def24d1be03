"""Which passes are measured: those of both kinds of linear that choose a method. Weight gradients gather as their linear does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...config import OverlapConfig
from ...schedule.order import A2A_GEMM, GEMM_A2A
from ...ulysses.parts import cut_exchange
from ..measure.cases import OPS, Case, cases_of, check_divisible
from ..measure.models import MODELS

COLUMN, ROW = OPS
OP_OF = {"qkv": COLUMN, "proj": ROW, "fc1": COLUMN, "fc2": ROW}
Sizes = tuple[int, int]


def model_cases(model: str, rows: Iterable[int], ranks: int) -> list[Case]:
    """fprop and dgrad of a model's linears for each M of `rows`, largest first.

    Raises:
        ValueError: a size cannot be sharded over the ranks.
    """
    return [
        case
        for m in sorted(set(rows), reverse=True)
        for slot, weight in MODELS[model].linears.items()
        for case in cases_of(slot, OP_OF[slot], weight, m, ranks, f"--model {model}: {slot}")
    ]


def ulysses_cases(model: str, rows: Iterable[int], ranks: int, config: OverlapConfig) -> list[Case]:
    """fprop and dgrad of the projections of a model's attention under Ulysses; of a long sequence the first part.

    Raises:
        ValueError: a size cannot be shared by the ranks.
    """
    linears, found = MODELS[model].linears, []
    for m in sorted(set(rows), reverse=True):
        for slot, op in (("qkv", GEMM_A2A), ("proj", A2A_GEMM)):
            check_divisible("--seq", m, ranks)
            features = linears[slot][0 if op == GEMM_A2A else 1]  # that are sent, of two bytes each
            ((_, positions), *_) = cut_exchange(m // ranks, 1, features * 2, config)
            found += cases_of(slot, op, linears[slot], positions * ranks, ranks, f"--model {model}: {slot}")
    return found


def weight_cases(columns: Sequence[Sizes], rows: Sequence[Sizes], ms: Iterable[int], ranks: int) -> list[Case]:
    """fprop and dgrad of single linears for each M of `ms`, by their whole weights [N, K], column-parallel (sharded over N) and
    row-parallel (over K).

    Raises:
        ValueError: a size cannot be sharded over the ranks.
    """
    return [
        case
        for m in ms
        for kind, op, weights in (("column", COLUMN, columns), ("row", ROW, rows))
        for n, k in weights
        for case in cases_of(kind, op, (n, k), m, ranks, f"--{kind} {n},{k}")
    ]


def one_a_bucket(cases: Iterable[Case], ranks: int) -> list[Case]:
    """The first of each bucket, in which a winner counts for all; largest M first."""
    found: dict[Any, Case] = {}
    for case in sorted(cases, key=lambda case: -case.m):
        found.setdefault(case.planned(ranks, torch.float32).bucket, case)
    return list(found.values())
