"""The committed predictions beside published scaling tables: still what the planner says, and never worse than no overlap."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from overlap_train.planning.machines import SYSTEMS
from overlap_train.planning.schedule.kinds import GATHER, SCATTER

FOLDER = Path(__file__).parents[2] / "benchmarks" / "planner"
ROWS: list[dict[str, Any]] = json.loads((FOLDER / "ditron.json").read_text())["rows"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ditron_record", FOLDER / "ditron.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_record_has_every_cell_once() -> None:
    keys = [(row["operator"], row["table"], row["model"], row["nodes"]) for row in ROWS]
    assert len(set(keys)) == len(keys) == 2 * 3 * 8 * 3
    assert {row["published"] is None for row in ROWS if row["operator"] == "GEMM + RS"} == {True}


def test_auto_is_never_slower_than_nccl() -> None:
    assert min(row["auto"] for row in ROWS) >= 1


@pytest.mark.parametrize("table", [9, 10, 11])
def test_one_node_is_near_what_was_published(table: int) -> None:
    rows = [row for row in ROWS if row["table"] == table and row["nodes"] == 1 and row["published"]]
    assert len(rows) == 8
    assert statistics.mean(abs(row["ours"] / row["published"] - 1) for row in rows) < 0.1


@pytest.mark.parametrize(
    ("kind", "table", "model", "nodes"),
    [
        (GATHER, 9, "LLaMA3.1-8B", 4),
        (GATHER, 10, "LLaMA3-7B", 1),
        (SCATTER, 10, "LLaMA3.1-8B", 1),
        (SCATTER, 11, "GPT-3-175B", 2),
    ],
)
def test_the_record_is_what_the_planner_says(script: ModuleType, kind: str, table: int, model: str, nodes: int) -> None:
    name = script.WORDS[kind]
    (row,) = (r for r in ROWS if (r["operator"], r["table"], r["model"], r["nodes"]) == (name, table, model, nodes))
    rows = next(t.rows[script.NODES.index(nodes)] for t in script.TABLES if t.number == table)
    cell = script.Cell(
        model, nodes, *script.planned(SYSTEMS[row["system"]], kind, model, rows, nodes), row["published"]
    )
    written = {"table": table, "system": row["system"], "operator": name, **cell.entry}
    assert written == row, "run benchmarks/planner/ditron.py again"
