"""The committed predictions beside published scaling tables: still what the planner says, and where it is off or loses."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from overlap_train.planning.schedule.kinds import GATHER, SCATTER

FOLDER = Path(__file__).parents[2] / "benchmarks" / "planner"
ROWS: list[dict[str, Any]] = json.loads((FOLDER / "ditron.json").read_text())["rows"]
# Where training that nobody tuned is planned slower than NCCL and the product; both are 32 ranks of H20. 405B: each of six
# launches has 224 tiles for 73 SMs, four waves for little more than three; blocks are cut as for 132 SMs (tiling.py:
# FILLS_A_GPU). Qwen2: no TMA reads its K of 924, so `chunked` runs, whose products of 1024 rows leave SMs idle. `fused` by our
# plain kernels is planned at 1.22 there, but with such a K they were not measured across nodes.
RULE_LOSES = {("AG + GEMM", 10, "LLaMA3.1-405B", 4): 0.962, ("GEMM + RS", 10, "Qwen2-72B", 4): 0.971}
# One node, 10 % off or more. docs/planner-model.md explains the first three; the last two are no further off than their
# neighbours.
FAR_FROM_PUBLISHED = {
    (11, "GPT-3-175B"): 0.122, (11, "LLaMA3.1-405B"): 0.159, (11, "LLaMA3-7B"): -0.104,
    (9, "Qwen2-72B"): 0.1, (10, "Seed-OSS-36B"): 0.101,
}  # fmt: skip


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


@pytest.fixture(scope="module")
def rows(script: ModuleType) -> list[dict[str, Any]]:
    """What the planner says now, as the record has it."""
    return [
        {"table": table.number, "system": table.system, "operator": script.WORDS[kind], **cell.entry}
        for kind in (GATHER, SCATTER)
        for table in script.TABLES
        for cell in script.cells(table, kind)
    ]


def test_the_record_is_what_the_planner_says(rows: list[dict[str, Any]]) -> None:
    for row, written in zip(rows, ROWS, strict=True):
        assert row == written, "run benchmarks/planner/ditron.py again"


def test_training_without_a_table_loses_to_nccl_in_the_known_cells_only(rows: list[dict[str, Any]]) -> None:
    found = {(row["operator"], row["table"], row["model"], row["nodes"]): row["by_rule"] for row in rows}
    assert {cell: by_rule for cell, by_rule in found.items() if by_rule < 1} == RULE_LOSES


def test_one_node_is_near_what_was_published(rows: list[dict[str, Any]]) -> None:
    """Each cell within 10 %, but for those that are named above."""
    cells = [row for row in rows if row["nodes"] == 1 and row["published"]]
    errors = {(row["table"], row["model"]): round(row["ours"] / row["published"] - 1, 3) for row in cells}
    assert len(errors) == 24
    assert {cell: error for cell, error in errors.items() if abs(error) >= 0.1} == FAR_FROM_PUBLISHED
    for table in (9, 10, 11):
        assert statistics.mean(abs(error) for (number, _), error in errors.items() if number == table) < 0.06
