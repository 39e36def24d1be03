"""The table that the tuner prints: what was measured of each shape, and what won."""

from __future__ import annotations

from typing import Any

import torch

from ...methods import TRAITS
from ...planning.table import Winner
from ...planning.variants import PLAIN, VARIANTS
from ..measure.cases import Case
from ..measure.results import Columns, Row, plain


def shape_row(case: Case, ranks: int) -> Row:
    """One line of the printed table; sizes are those of one rank's product, M those of all ranks."""
    planned = case.planned(ranks, torch.float32)
    sizes = f"{planned.m}, {planned.n}, {planned.k}"
    return {"linear": case.model, "pass": case.pass_, "kind": planned.kind, "sizes": sizes}


def figures(winner: Winner) -> Row:
    """A winner's figures for the printed table: ms, winner, gain. gain: how much faster than collective."""
    collective = winner.ms.get("collective")
    name = (winner.variant_of(winner.method) or PLAIN).named(winner.method)
    gain = None if collective is None else f"{100 * (collective / winner.ms[name] - 1):+.1f} %"
    return {"ms": winner.ms, "winner": name, "gain": gain}


SHAPE_COLUMNS = plain({"linear": "linear", "pass": "pass", "kind": "kind", "M, N, K": "sizes"})


def columns_of(rows: list[Row]) -> Columns:
    """The shape, the milliseconds of each method that ran anywhere, the winner and its gain."""
    possible = [variant.named(method) for method in TRAITS for variant in VARIANTS]
    names = [name for name in possible if any(name in row["ms"] for row in rows)]
    times: list[Any] = [(f"{name} ms", lambda row, name=name: row["ms"].get(name)) for name in names]
    return (*SHAPE_COLUMNS, *times, *plain({"winner": "winner", "over collective": "gain"}))
