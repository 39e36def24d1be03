"""Files and tables of the benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_train.tools.bench import layers, operators, output
from overlap_train.tools.bench.output import LAYER_COLUMNS, OPERATOR_COLUMNS
from overlap_train.tools.measure.cases import Case
from overlap_train.tools.measure.results import Columns, Results, cells, markdown, screen
from overlap_train.tools.measure.shapes import LAYERS
from overlap_train.tools.measure.timing import Timing

OPERATOR_KEYS = (
    "op", "pass", "world", "m", "n", "k", "dtype", "method", "ms", "host_us", "sequence_ms", "async_tp_ms", "gemm_ms",
    "comm_ms", "bound",
)  # fmt: skip
LAYER_KEYS = (
    "layer", "world", "seq", "method", "ms", "tuned_ms", "megatron_ms", "async_tp_ms", "te_ms", "te_userbuffers_ms", "gemms_ms",
    "host_us",
)  # fmt: skip
TIMES = {
    "fused": Timing(0.3, 50.0),
    "sequence": Timing(0.6, 40.0),
    "gemm": Timing(0.25, 15.0),
    "comm": Timing(0.2, 26.0),
    "async_tp": Timing(0.7, 385.0),
}


def operator_row(without: str = "", m: int = 8192) -> dict[str, Any]:
    times = {name: timing for name, timing in TIMES.items() if name != without}
    return operators.row(Case("llama3-8b", "ag_gemm", "fprop", m, 14336, 4096), "fused", times, 4, torch.bfloat16)


def layer_row(without: str = "") -> dict[str, Any]:
    times = {"fused": Timing(3.1, 400.0), "gemms": Timing(3.0, 90.0), "megatron": Timing(3.9, 500.0)}
    times = {name: timing for name, timing in times.items() if name != without}
    return layers.row(LAYERS["llama3-8b-mlp"], 8192, "fused", times, 4)


def test_an_operator_row_has_the_keys_and_figures_of_the_format() -> None:
    row = operator_row()
    assert tuple(row) == OPERATOR_KEYS
    assert (row["dtype"], row["ms"], row["host_us"], row["async_tp_ms"]) == ("bfloat16", 0.3, 50.0, 0.7)
    assert row["bound"] == 0.6 / 0.25
    assert output.speed_up(row) == 0.6 / 0.3


def test_a_layer_row_has_the_keys_of_the_format() -> None:
    row = layer_row()
    assert set(row) == set(LAYER_KEYS)
    assert (row["megatron_ms"], row["async_tp_ms"]) == (3.9, None)
    assert (row["te_ms"], row["te_userbuffers_ms"], row["tuned_ms"]) == (None, None, None)


def test_a_layer_row_says_what_auto_takes_by_measured_winners() -> None:
    timings = {"auto": Timing(3.3, 400.0), "tuned": Timing(3.0, 400.0), "gemms": Timing(2.9, 90.0)}
    row = layers.row(LAYERS["llama3-8b-mlp"], 8192, "auto", timings, 2)
    assert row["tuned_ms"] == 3.0
    heading, shown = cells([row], LAYER_COLUMNS)
    assert (shown[heading.index("tuned")], shown[heading.index("ms/tuned")]) == ("3.000", "1.100")


@pytest.mark.parametrize(("ran", "best"), [({"te_default": 3.5, "te_ring": 3.4}, 3.4), ({"te_default": 3.5}, 3.5)])
def test_userbuffers_are_given_by_their_better_configuration(ran: dict[str, float], best: float) -> None:
    times = {"fused": 3.1, "gemms": 3.0, "te": 3.6} | ran
    timings = {name: Timing(ms, 100.0) for name, ms in times.items()}
    row = layers.row(LAYERS["llama3-8b-mlp"], 8192, "fused", timings, 4)
    assert (row["te_ms"], row["te_userbuffers_ms"]) == (3.6, best)


@pytest.mark.parametrize(
    ("row", "columns"),
    [(operator_row(without="async_tp"), OPERATOR_COLUMNS), (layer_row(without="megatron"), LAYER_COLUMNS)],
    ids=["op", "layer"],
)
def test_a_baseline_that_did_not_run_is_null_and_a_dash(row: dict[str, Any], columns: Columns) -> None:
    assert None in row.values()
    assert "-" in cells([row], columns)[1]
    for table in (markdown, screen):
        assert "megatron: not installed" in table([row], ["megatron: not installed"], columns)


def test_the_file_is_complete_after_every_addition(tmp_path: Path) -> None:
    results = Results(tmp_path / "new" / "operators.json", {"device": "cpu"})
    for count in (1, 2):
        results.add([operator_row()])
        saved = json.loads(results.path.read_text())  # type: ignore[union-attr]
        assert set(saved) == {"hardware", "versions", "date", "rows"}
        assert saved["rows"] == [operator_row()] * count
    assert [path.name for path in results.path.parent.iterdir()] == ["operators.json"]  # type: ignore[union-attr]


def test_rows_that_were_measured_again_replace_the_last_ones(tmp_path: Path) -> None:
    results = Results(tmp_path / "layers.json")
    results.add([layer_row()])
    results.add([layer_row(), layer_row()])
    again = [layer_row() | {"te_ms": 3.5}] * 2
    results.revise(again)
    assert json.loads((tmp_path / "layers.json").read_text())["rows"] == results.rows == [layer_row(), *again]
    results.revise([])
    assert len(results.rows) == 3


def test_only_failures_of_our_own_fail_the_run() -> None:
    results = Results()
    results.note("async_tp: no such operator", failure=False)
    assert not results.failed
    results.note("fused: wrong", failure=True)
    assert results.failed and results.notes == ["async_tp: no such operator", "FAILED fused: wrong"]


def test_what_failed_is_said_once_beside_the_times() -> None:
    results = Results()
    row = {"method": "fused", "ms": 1.25}
    assert results.outcome([row]) == "fused 1.250 ms"
    results.note("async_tp: no such operator", failure=False)
    results.note("direct: wrong", failure=True)
    said = results.outcome([row, row], lambda row: "auto")
    assert said == "auto 1.250 ms, auto 1.250 ms; FAILED direct: wrong"
    results.note("no memory", failure=True)
    assert results.outcome([]) == "no result; FAILED no memory"


def test_the_summary_has_the_lowest_and_the_geometric_mean() -> None:
    slow = {**operator_row(), "ms": 1.2}  # ratios 2 / 2.4 and 0.5 / 2.4
    (line,) = output.summary([operator_row(), slow])
    assert "lowest 0.208, geometric mean 0.417 over 2 shapes" in line


def test_the_screen_is_aligned() -> None:
    lines = screen([operator_row(), operator_row(without="async_tp", m=256)], [], OPERATOR_COLUMNS).splitlines()[:3]
    assert len({len(line) for line in lines}) == 1
