"""speedup.png: operators by each method, over NCCL + cuBLAS, and how far perfect overlap would go; shape by shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..measure.shapes import WEIGHTS, weight_of
from ..pictures.machine import Record, about_nodes, machine_of
from ..pictures.style import LOOKS, PERFECT, canvas, in_order, look_of, save
from .output import Row, speed_up

OPERATORS = {
    "ag_gemm": "all_gather_linear",
    "gemm_rs": "linear_reduce_scatter",
    "gemm_a2a": "linear_all_to_all",
    "a2a_gemm": "all_to_all_linear",
}
BASELINES = ("async_tp", "three_gemms", "by_nodes")  # beside the sequence
PASSES = {"fprop": "forward", "dgrad": "input gradient"}
CEILING = (
    f"Higher is better. {PERFECT.capitalize()}: the longer of cuBLAS GEMM and NCCL alone (a faster GEMM passes it)."
)
Lines = Mapping[str, Sequence[Row]]  # what stands beside a line of markers, and its rows


def by_method(rows: Iterable[Row]) -> dict[str, float]:
    """Speed-ups over NCCL + cuBLAS in rows of one case: of each method, of the baselines that ran, and the ceiling."""
    found: dict[str, float] = {}
    for row in rows:
        found[row["method"]] = speed_up(row)
        found |= {
            name: row["sequence_ms"] / row[f"{name}_ms"] for name in BASELINES if row.get(f"{name}_ms") is not None
        }
        found["bound"] = row["bound"]
    return found


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by their values of these keys, in the order in which the first of each comes."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def names_of(rows: Iterable[Row]) -> tuple[str, ...]:
    """The names of what is drawn, in the order that every picture has."""
    return tuple(in_order(by_method(rows)))


def model_of(n: int, k: int) -> str:
    """The model that a weight belongs to and the weight's sizes, in two lines. Of models that share it a Llama 3."""
    models = [name for name in WEIGHTS if set(weight_of(name)) == {n, k}]
    model = min(models, key=lambda name: not name.startswith("llama3"), default="")
    return f"{model}\n{n} x {k}".strip()


def draw_speed_up(rows: list[Row], record: Record, path: Path) -> Path:
    """A panel for each operator and pass, a line a weight, a marker a method."""
    sizes = {row["m"] for row in rows}
    m = 8192 if 8192 in sizes else max(sizes)
    rows = [row for row in rows if row["m"] == m]
    panels = {
        f"{OPERATORS[op]}, {PASSES[pass_]}": {
            model_of(*weight): some for weight, some in grouped(members, "n", "k").items()
        }
        for (op, pass_), members in grouped(rows, "op", "pass").items()
    }
    title = f"Operators: speed-up over NCCL + cuBLAS, M = {m}, {machine_of(record)}"
    return draw_lines(panels, (title, CEILING, *about_nodes(record)), names_of(rows), path)


def draw_lines(panels: Mapping[str, Lines], header: tuple[str, ...], names: tuple[str, ...], path: Path) -> Path:
    """Panels of lines with a marker for each method, two panels side by side."""
    tallest = max(map(len, panels.values()))
    figure, grid = canvas(len(panels), min(2, len(panels)), 0.42 * tallest + 0.75, header, names, sharex=True)
    for axes, (title, lines) in zip(grid.flat, panels.items(), strict=False):
        _draw_panel(axes, lines, names)
        axes.set_title(title)
    for axes in grid[-1]:
        axes.set_xlabel("speed-up (1 = NCCL + cuBLAS)")
    return save(figure, path)


def _draw_panel(axes: Any, lines: Lines, names: tuple[str, ...]) -> None:
    axes.set_yticks(range(len(lines)), list(lines))
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.hlines([place + 0.5 for place in range(len(lines) - 1)], 0, 1, "#E4E4E4", transform=axes.get_yaxis_transform())
    axes.axvline(1, color=LOOKS["sequence"].colour, linewidth=1)
    axes.tick_params(left=False, labelbottom=True)
    axes.grid(axis="x")
    for place, members in enumerate(lines.values()):
        for name, value in by_method(members).items():
            _mark(axes, name, value, place, names)


def _mark(axes: Any, name: str, value: float, place: int, names: tuple[str, ...]) -> None:
    """One marker in a line; every method has a height of its own, so that equal ones are all seen."""
    if name == "bound":
        axes.vlines(value, place - 0.42, place + 0.42, "black", linewidth=2.5, zorder=2)
        return
    lanes = [other for other in names if other != "bound"]
    height = place + (lanes.index(name) - (len(lanes) - 1) / 2) * 0.72 / len(lanes)
    look, edge = look_of(name), {"markeredgecolor": "white", "markeredgewidth": 0.4}
    axes.plot(value, height, look.marker, color=look.colour, markersize=6.5, zorder=3, **edge)
