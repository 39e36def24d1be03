"""Operators against M: curves that can be read, and lines of markers where M are close together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from overlap_train.tools.bench import operator_plots, output, size_plots
from overlap_train.tools.bench.size_plots import are_close, curves, draw_against_m
from overlap_train.tools.pictures.style import load, look_of
from tests.unit.test_bench_output import operator_row

RAGGED = (1992, 1996, 2048, 4096, 4100)
LONG = (8192, 32768, 131072, 262144, 491520)


@pytest.fixture(autouse=True)
def _closes_figures() -> Iterator[None]:
    """As `save` does, which the tests replace."""
    yield
    load().close("all")


def figure_of(rows: list[dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    figures: list[Any] = []
    for module in (operator_plots, size_plots):
        monkeypatch.setattr(module, "save", lambda figure, path: figures.append(figure) or path)
    draw_against_m(rows, {"rows": rows}, folder / "speedup_m.png")
    figures[0].canvas.draw()
    return figures[0]


def ticks_of(axes: Any) -> list[str]:
    """What is written below, from left to right; a tick may have no label."""
    return [label.get_text() for label in axes.get_xticklabels() if label.get_visible()]


def test_curves_join_the_rows_of_one_shape_by_m() -> None:
    found = curves([operator_row(m=8192), operator_row(m=256, without="async_tp")])
    fused = output.speed_up(operator_row())
    assert found["fused"] == [(256, fused), (8192, fused)]
    assert [m for m, _ in found["async_tp"]] == [8192]
    assert [m for m, _ in found["bound"]] == [256, 8192]


@pytest.mark.parametrize(("sizes", "close"), [(RAGGED, True), (LONG, False), ((128, 256, 512, 1024), False)])
def test_m_are_close_where_a_few_rows_are_between_them(sizes: tuple[int, ...], close: bool) -> None:
    assert are_close(sizes) is close


def test_close_m_have_lines_of_markers_with_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [operator_row(m=m) | {"op": op} for m in RAGGED[::-1] for op in ("ag_gemm", "gemm_rs")]
    figure = figure_of(rows, tmp_path, monkeypatch)
    assert [axes.get_title(loc="left").splitlines() for axes in figure.axes] == [
        ["all_gather_linear, forward", "llama3-8b, 14336 x 4096"],
        ["linear_reduce_scatter, forward", "llama3-8b, 14336 x 4096"],
    ]
    for axes in figure.axes:
        assert [label.get_text() for label in axes.get_yticklabels()] == [f"M = {m}" for m in RAGGED]
        assert all(len(line.get_xdata()) <= 2 for line in axes.lines), "nothing joins them"


@pytest.mark.parametrize(
    ("sizes", "written"),
    [
        (LONG, ["8k", "32k", "128k", "", "480k"]),
        ((512, 1000, 2048), ["512", "1000", "2k"]),
    ],
)
def test_labels_are_the_m_and_do_not_touch(
    sizes: tuple[int, ...], written: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [("ag_gemm", "fprop"), ("ag_gemm", "dgrad"), ("gemm_rs", "fprop"), ("gemm_rs", "dgrad")]
    rows = [operator_row(m=m) | {"op": op, "pass": pass_} for m in sizes for op, pass_ in cases]
    for axes in figure_of(rows, tmp_path, monkeypatch).axes:
        assert ticks_of(axes) == written
        boxes = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
        assert all(right.x0 > left.x1 for left, right in pairwise(boxes))


def test_what_was_not_measured_has_no_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight in both operators, another in the second only, and a third in the first: axes are written at the last of each
    column, weights at the first of each row."""
    both = [operator_row(m=m) | {"op": op} for m in (256, 8192) for op in ("ag_gemm", "gemm_rs")]
    right = [row | {"n": 4096} for row in both if row["op"] == "gemm_rs"]
    left = [row | {"n": 2048, "k": 2048} for row in both if row["op"] == "ag_gemm"]
    axes = figure_of([*both, *right, *left], tmp_path, monkeypatch).axes
    assert [one.get_ylabel() for one in axes] == [
        "llama3-8b\n14336 x 4096", "", "llama3-8b-proj\n4096 x 4096", "2048 x 2048",
    ]  # fmt: skip
    assert [one.get_xlabel() for one in axes] == ["", "", "M (rows)", "M (rows)"]
    assert [ticks_of(one) for one in axes] == [[], [], ["256", "8k"], ["256", "8k"]]
    assert [any(label.get_visible() for label in one.get_yticklabels()) for one in axes] == [True, False, True, True]
    assert all(one.lines for one in axes)


def test_a_dash_tells_apart_what_a_grey_print_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the curves and in the legend."""
    rows = [operator_row(m=m) | {"op": "gemm_a2a", "three_gemms_ms": 0.5} for m in (256, 8192)]
    figure = figure_of(rows, tmp_path, monkeypatch)
    drawn = {line.get_color(): line.get_linestyle() for line in figure.axes[0].lines}
    own = look_of("three_gemms")
    explained = {line.get_label(): line.get_linestyle() for line in figure.legends[0].get_lines()}
    assert drawn[own.colour] == explained[own.label] == "--"
    assert drawn[look_of("fused").colour] == explained["fused"] == "-"
