"""Which passes are measured: those of both kinds of linear that choose a method. Weight gradients gather as their linear does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..bench.operators import pass_of
from ..bench.shapes import LAYERS, OPS, Case, Layer, check_divisible, layer_cases

MODELS = tuple(dict.fromkeys(name.removesuffix("-attn").removesuffix("-mlp") for name in LAYERS))
COLUMN, ROW = OPS

Sizes = tuple[int, int]


def model_cases(model: str, rows: Sequence[int], ranks: int) -> list[Case]:
    """fprop and dgrad of a model's linears for each M of `rows`.

    Raises:
        ValueError: a size cannot be sharded over the ranks.
    """
    names = [name for name in (model, f"{model}-attn", f"{model}-mlp") if name in LAYERS]
    found = layer_cases(names, sorted(set(rows), reverse=True), ranks)
    return [case for layer, m in found for case in cases_of(layer, m)]


def cases_of(layer: Layer, m: int) -> Iterable[Case]:
    """The passes of both linears of a layer."""
    slots = ("qkv", "proj") if layer.name.endswith("-attn") else ("fc1", "fc2")
    sizes = ((layer.column_n, layer.column_k), (layer.row_n, layer.row_k))
    for slot, op, weight in zip(slots, OPS, sizes, strict=True):
        yield from _passes(slot, op, m, weight)


def weight_cases(columns: Sequence[Sizes], rows: Sequence[Sizes], ms: Iterable[int], ranks: int) -> list[Case]:
    """The same of single linears by their whole weights [N, K], column-parallel (sharded over N) and row-parallel (over K).

    Raises:
        ValueError: a size cannot be sharded over the ranks.
    """
    found: list[Case] = []
    for m in ms:
        check_divisible("--seq", m, ranks)
        for n, k in columns:
            check_divisible(f"--column {n},{k}: features", n, ranks)
            found += _passes("column", COLUMN, m, (n, k))
        for n, k in rows:
            check_divisible(f"--row {n},{k}: features", k, ranks)
            found += _passes("row", ROW, m, (n, k))
    return found


def one_a_bucket(cases: Iterable[Case], ranks: int) -> list[Case]:
    """The first of each bucket, in which a winner counts for all; largest M first."""
    found: dict[Any, Case] = {}
    for case in sorted(cases, key=lambda case: -case.m):
        found.setdefault(pass_of(case, ranks, torch.float32).bucket, case)
    return list(found.values())


def _passes(slot: str, op: str, m: int, weight: Sizes) -> list[Case]:
    return [Case(slot, op, pass_, m, *weight) for pass_ in ("fprop", "dgrad")]
