"""The committed predictions beside published scaling tables: still what the planner says, and where it is off or loses."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from overlap_train.schedule.order import GATHER, SCATTER

FOLDER = Path(__file__).parents[2] / "benchmarks" / "planner"
Cells = dict[tuple[Any, str], list[Any]]  # by table and kind of operator
# Where training that nobody tuned is planned slower than NCCL and the product; both are 32 ranks of H20. 405B: each of six
# launches has 224 tiles for 73 SMs, four waves for little more than three; blocks are cut as for 132 SMs (tiling.py:
# FILLS_A_GPU). Qwen2: no TMA reads its K of 924, so `chunked` runs, whose products of 1024 rows leave SMs idle. `fused` by our
# plain kernels is planned at 1.22 there, but with such a K they were not measured across nodes.
RULE_LOSES = {("AG + GEMM", 10, "LLaMA3.1-405B", 4): 0.962, ("GEMM + RS", 10, "Qwen2-72B", 4): 0.971}
# One node, 10 % off or more. docs/planner-model.md explains the first three; the last two are no further off than their
# neighbours.
FAR_FROM_PUBLISHED = {
    (11, "GPT-3-175B"): 0.123, (11, "LLaMA3.1-405B"): 0.159, (11, "LLaMA3-7B"): -0.104,
    (9, "Qwen2-72B"): 0.1, (10, "Seed-OSS-36B"): 0.101,
}  # fmt: skip


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ditron_record", FOLDER / "ditron.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cells(script: ModuleType) -> Cells:
    """What the planner says now."""
    return {(table, kind): list(script.cells(table, kind)) for kind in (GATHER, SCATTER) for table in script.TABLES}


def test_the_page_is_what_the_planner_says(script: ModuleType, cells: Cells) -> None:
    page = (FOLDER / "ditron.md").read_text()
    assert page.count("\n## ") == len(cells) == 2 * 3
    for (table, kind), some in cells.items():
        assert len(some) == 8 * 3
        assert {cell.published is None for cell in some} == {kind == SCATTER}
        text = "\n".join(script.section(table.title(kind), some))
        assert text.rstrip() in page, "run benchmarks/planner/ditron.py again"


def test_training_without_a_table_loses_to_nccl_in_the_known_cells_only(script: ModuleType, cells: Cells) -> None:
    found = {
        (script.WORDS[kind], table.number, cell.model, cell.nodes): round(cell.by_rule, 3)
        for (table, kind), some in cells.items()
        for cell in some
    }
    assert {cell: by_rule for cell, by_rule in found.items() if by_rule < 1} == RULE_LOSES


def test_one_node_is_near_what_was_published(cells: Cells) -> None:
    """Each cell within 10 %, but for those that are named above."""
    errors = {
        (table.number, cell.model): round(cell.ours / cell.published - 1, 3)
        for (table, _), some in cells.items()
        for cell in some
        if cell.nodes == 1 and cell.published
    }
    assert len(errors) == 24
    assert {cell: error for cell, error in errors.items() if abs(error) >= 0.1} == FAR_FROM_PUBLISHED
    for table in (9, 10, 11):
        assert statistics.mean(abs(error) for (number, _), error in errors.items() if number == table) < 0.06
