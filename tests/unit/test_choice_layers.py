"""Layers without tuning against the same layers by the tuner's winners (`tuned_ms`): none takes more than 3 % longer, but those
of ABOVE. Folders are found: a new record takes part."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from overlap_train.tools.plan.records import Row, rows_of
from tests.unit.test_choice_records import BENCHMARKS, MOST, above, folders_with, listed

# Why a layer that takes longer stands; `holds` has what must be true for it.
ONE_OF_TWO = "the same plans, with or without a CUDA graph, take at most 3 % longer"
ABOVE: Mapping[str, Mapping[str, tuple[float, str]]] = {
    "h200x2/untuned": {"llama3-70b-attn s=2048 auto_graph": (0.033, ONE_OF_TWO)},
}


def rows_by_name(folder: str) -> dict[str, Row]:
    rows = rows_of(BENCHMARKS / folder, "layers.json")
    return {f"{row['layer']} s={row['seq']} {row['method']}": row for row in rows}


def costs_of(folder: str) -> dict[str, float]:
    return {name: row["ms"] / row["tuned_ms"] - 1 for name, row in rows_by_name(folder).items() if row.get("tuned_ms")}


TUNED = tuple(folder for folder in folders_with("layers.json") if costs_of(folder))


def test_layers_were_measured_tuned_too() -> None:
    assert set(TUNED) >= ABOVE.keys() and len(costs_of("h200x2/untuned")) == 40


@pytest.mark.parametrize("folder", TUNED)
def test_an_untuned_layer_takes_little_longer(folder: str) -> None:
    assert above(costs_of(folder)) == listed(ABOVE.get(folder, {}))


def holds(why: str, folder: str, name: str) -> bool:
    """Whether it is true of a layer."""
    eager = name.removesuffix("_graph")
    return why == ONE_OF_TWO and costs_of(folder)[eager if name != eager else f"{name}_graph"] <= MOST


@pytest.mark.parametrize("folder", ABOVE)
def test_why_the_others_stand_is_true_of_them(folder: str) -> None:
    assert not [name for name, (_, why) in ABOVE[folder].items() if not holds(why, folder, name)]
