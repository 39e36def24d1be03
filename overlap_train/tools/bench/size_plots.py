"""speedup_m.png: operators by each method, over NCCL + cuBLAS, against M.

Curves. Where some M lie close together (4096 and 4100) a line of markers for each M: there the question is what a few rows more
change.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..pictures.machine import Record, about_nodes, machine_of
from ..pictures.style import BOUND, LOOKS, SMALL, canvas, look_of, save
from .operator_plots import CEILING, OPERATORS, PASSES, by_method, draw_lines, grouped, model_of, names_of
from .output import Row

CLOSE = 1.25  # the ratio of two M between which a curve would be all but vertical
Grid = list[list[Any]]  # axes, and None where there are none


def draw_against_m(rows: list[Row], record: Record, path: Path) -> Path:
    """Curves, or lines of markers where M are close together."""
    header = (f"Operators: speed-up over NCCL + cuBLAS against M, {machine_of(record)}", CEILING, *about_nodes(record))
    sizes = sorted({row["m"] for row in rows})
    return (_draw_lines if are_close(sizes) else _draw_curves)(rows, header, path)


def are_close(sizes: Sequence[int]) -> bool:
    """Whether any two of these M, which increase, are too close for curves."""
    return any(more < CLOSE * less for less, more in pairwise(sizes))


def _draw_lines(rows: list[Row], header: tuple[str, ...], path: Path) -> Path:
    """A panel for each operator, pass and weight, a line for each M."""
    panels = {}
    for (op, pass_, n, k), members in grouped(rows, "op", "pass", "n", "k").items():
        lines = {f"M = {m}": some for (m,), some in sorted(grouped(members, "m").items())}
        panels[f"{OPERATORS[op]}, {PASSES[pass_]}\n{model_of(n, k)}".replace(f"\n{n} x", f", {n} x")] = lines
    return draw_lines(panels, header, names_of(rows), path)


def _draw_curves(rows: list[Row], header: tuple[str, ...], path: Path) -> Path:
    """A row of panels for each weight, a column for each operator and pass; a weight and its transpose share a row."""
    names, cases = names_of(rows), list(grouped(rows, "op", "pass"))
    weights = list(dict.fromkeys(tuple(sorted((row["n"], row["k"]), reverse=True)) for row in rows))
    count, height = len(weights) * len(cases), 1.4 + 0.9 / len(weights)
    figure, grid = canvas(count, len(cases), height, header, names, "-", sharex=True, sharey=True)
    panels: Grid = []
    for line, weight in zip(grid, weights, strict=True):
        panels.append([])
        for axes, case in zip(line, cases, strict=True):
            here = [row for row in rows if (row["op"], row["pass"]) == case and {row["n"], row["k"]} == set(weight)]
            panels[-1].append(_draw_panel(axes, here))
    titles = [f"{OPERATORS[op]},\n{PASSES[pass_]}" for op, pass_ in cases]
    _name_panels(panels, [model_of(*weight) for weight in weights], titles)
    _label_sizes(next(line[0] for line in reversed(panels) if line[0]), sorted({row["m"] for row in rows}))
    return save(figure, path)


def _draw_panel(axes: Any, rows: list[Row]) -> Any:
    """A curve for each method, against M; without rows the panel is taken away. Returns the axes, or None."""
    if not rows:
        axes.remove()
        return None
    for name, points in curves(rows).items():
        # auto is one of the others: it is larger, and still seen under that one's marker
        look, size = look_of(name), {"bound": 0, "auto": 7}.get(name, 4)
        style = {"marker": look.marker, "linestyle": look.dash, "color": look.colour}
        axes.plot(*zip(*points, strict=True), **style, markersize=size, linewidth=2 if look.marker == BOUND else 1.2)
    axes.axhline(1, color=LOOKS["sequence"].colour, linewidth=1)
    axes.grid(axis="y")
    return axes


def _name_panels(panels: Grid, weights: Sequence[str], titles: Sequence[str]) -> None:
    """Weights on the left, titles above and M below, each at the outermost panel of its row or column that is there."""
    for line, weight in zip(panels, weights, strict=True):
        first = next(axes for axes in line if axes)
        first.set_ylabel(weight)
        first.tick_params(labelleft=True)
    for column, title in zip(zip(*panels, strict=True), titles, strict=True):
        there = [axes for axes in column if axes]
        there[0].set_title(title, fontsize=SMALL)
        there[-1].set_xlabel("M (rows)")
        there[-1].tick_params(labelbottom=True)


def _label_sizes(axes: Any, sizes: Sequence[int]) -> None:
    """Give the axis that all panels share these M. Of labels that would touch each other the left one stays. axes: of a panel
    whose labels are seen; only these have places."""
    labels, end = [str(m) if m % 1024 else f"{m // 1024}k" for m in sizes], float("-inf")
    axes.set(xscale="log", ylim=(0, None))
    axes.set_xticks(sizes, labels)
    axes.minorticks_off()
    axes.figure.draw_without_rendering()
    for place, tick in enumerate(axes.xaxis.get_major_ticks()):
        box = tick.label1.get_window_extent()
        labels[place], end = (labels[place], box.x1) if box.x0 > end + box.height / 4 else ("", end)
    axes.set_xticks(sizes, labels)


def curves(rows: list[Row]) -> dict[str, list[tuple[int, float]]]:
    """The points (M, speed-up) of every method, of async-TP and of the ceiling, by increasing M."""
    found: dict[str, list[tuple[int, float]]] = {}
    for (m,), members in sorted(grouped(rows, "m").items()):
        for name, value in by_method(members).items():
            found.setdefault(name, []).append((m, value))
    return found
