"""Pictures of saved results, drawn beside their JSON files.

speedup.png     operators, across nodes too: speed-up over NCCL + cuBLAS and its ceiling, shape by shape
speedup_m.png   operators: the same against M; with several M only
layers.png      layers: time over that of the six GEMMs, whose floor is 1.00
timeline.png    one call by each method (timeline.py)
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..measure.results import ranks_of
from . import timeline
from .bars import Bar, bars
from .output import Row, is_as_found, speed_up
from .shapes import WEIGHTS, weight_of
from .style import LOOKS, PERFECT, SMALL, canvas, in_order, load, look_of, save

OPERATORS = {
    "ag_gemm": "all_gather_linear",
    "gemm_rs": "linear_reduce_scatter",
    "gemm_a2a": "linear_all_to_all",
    "a2a_gemm": "all_to_all_linear",
}
Record = dict[str, Any]  # a JSON file: its rows, and on what they were measured
BASELINES = ("async_tp", "three_gemms", "by_nodes")  # of operators, beside the sequence
PASSES = {"fprop": "forward", "dgrad": "input gradient"}
CEILING = (
    f"Higher is better. {PERFECT.capitalize()}: the longer of cuBLAS GEMM and NCCL alone (a faster GEMM passes it)."
)
LONGEST = 2.2  # where bars of time ratios are broken: one baseline at 3.4 would leave no room to compare the rest
LONGEST_BLOCK = 1.25  # the same of blocks, most of which differ by some per cent


def draw(folder: Path) -> list[Path]:
    """Draw what the JSON files of `folder` hold; returns the images' paths.

    Raises:
        ValueError: matplotlib is not installed, or the folder holds no results.
    """
    load()
    drawn = []
    record = _read(folder / "operators.json")
    if operators := [row for row in record.get("rows", ()) if is_as_found(row)]:
        drawn.append(_speed_up(operators, record, folder / "speedup.png"))
        if len({row["m"] for row in operators}) > 1:
            drawn.append(_against_m(operators, record, folder / "speedup_m.png"))
    record = _read(folder / "layers.json")
    if rows := record.get("rows"):
        drawn.append((_blocks if "alone_ms" in rows[0] else _layers)(rows, record, folder / "layers.png"))
    if "calls" in (recording := _read(folder / "timeline.json")):
        drawn.append(timeline.draw(recording, folder / "timeline.png"))
    if not drawn:
        raise ValueError(
            f"{folder}: no operators.json, layers.json or timeline.json with results; "
            f"run the benchmark with --out {folder} "
            "(what compare_mfu.py wrote is drawn by its --redraw)"
        )
    return drawn


def _read(path: Path) -> Record:
    return json.loads(path.read_text()) if path.exists() else {}


def _ranks(record: Record) -> str:
    """How many GPUs, or CPU processes, measured it."""
    return ranks_of(record.get("hardware", {}), record["rows"][0]["world"])


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


def _grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def _names(rows: list[Row]) -> tuple[str, ...]:
    """The names of what is drawn, in the order that every picture has."""
    return tuple(in_order(by_method(rows)))


def _case(op: str, pass_: str) -> tuple[str, str]:
    return OPERATORS[op], PASSES[pass_]


def _model(n: int, k: int) -> str:
    """The model that a weight belongs to and the weight's sizes, in two lines. Of models that share it a Llama 3."""
    models = [name for name in WEIGHTS if set(weight_of(name)) == {n, k}]
    model = min(models, key=lambda name: not name.startswith("llama3"), default="")
    return f"{model}\n{n} x {k}".strip()


def _speed_up(rows: list[Row], record: Record, path: Path) -> Path:
    """A panel for each operator and pass, a row a weight, a marker a method."""
    sizes = {row["m"] for row in rows}
    m = 8192 if 8192 in sizes else max(sizes)
    rows = [row for row in rows if row["m"] == m]
    names, panels = _names(rows), _grouped(rows, "op", "pass")
    tallest = max(len(_grouped(members, "n", "k")) for members in panels.values())
    header = (f"Operators: speed-up over NCCL + cuBLAS, M = {m}, {_ranks(record)}", CEILING)
    figure, grid = canvas(len(panels), min(2, len(panels)), 0.42 * tallest + 0.75, header, names, sharex=True)
    for axes, (case, members) in zip(grid.flat, panels.items(), strict=False):
        _draw_case(axes, _grouped(members, "n", "k"), names)
        axes.set_title(", ".join(_case(*case)))
    for axes in grid[-1]:
        axes.set_xlabel("speed-up (1 = NCCL + cuBLAS)")
    return save(figure, path)


def _draw_case(axes: Any, weights: dict[tuple[Any, ...], list[Row]], names: tuple[str, ...]) -> None:
    axes.set_yticks(range(len(weights)), [_model(*weight) for weight in weights])
    axes.set_ylim(len(weights) - 0.5, -0.5)
    axes.hlines(
        [place + 0.5 for place in range(len(weights) - 1)], 0, 1, "#E4E4E4", transform=axes.get_yaxis_transform()
    )
    axes.axvline(1, color=LOOKS["sequence"].colour, linewidth=1)
    axes.tick_params(left=False, labelbottom=True)
    axes.grid(axis="x")
    for place, members in enumerate(weights.values()):
        for name, value in by_method(members).items():
            _mark(axes, name, value, place, names)


def _mark(axes: Any, name: str, value: float, place: int, names: tuple[str, ...]) -> None:
    """One marker in a row; every method has a height of its own, so that equal ones are all seen."""
    if name == "bound":
        axes.vlines(value, place - 0.42, place + 0.42, "black", linewidth=2.5, zorder=2)
        return
    lanes = [other for other in names if other != "bound"]
    height = place + (lanes.index(name) - (len(lanes) - 1) / 2) * 0.72 / len(lanes)
    look, edge = look_of(name), {"markeredgecolor": "white", "markeredgewidth": 0.4}
    axes.plot(value, height, look.marker, color=look.colour, markersize=6.5, zorder=3, **edge)


def _against_m(rows: list[Row], record: Record, path: Path) -> Path:
    """A row of panels for each weight, a column for each operator and pass; a weight and its transpose share a row."""
    names, cases = _names(rows), list(_grouped(rows, "op", "pass"))
    weights = list(dict.fromkeys(tuple(sorted((row["n"], row["k"]), reverse=True)) for row in rows))
    header = (f"Operators: speed-up over NCCL + cuBLAS against M, {_ranks(record)}", CEILING)
    count, height = len(weights) * len(cases), 1.4 + 0.9 / len(weights)
    figure, grid = canvas(count, len(cases), height, header, names, "-", sharex=True, sharey=True)
    for line, weight in zip(grid, weights, strict=True):
        for axes, case in zip(line, cases, strict=True):
            here = [row for row in rows if (row["op"], row["pass"]) == case and {row["n"], row["k"]} == set(weight)]
            _draw_curves(axes, here)
        line[0].set_ylabel(_model(*weight))
    for axes, case in zip(grid[0], cases, strict=True):
        axes.set_title(",\n".join(_case(*case)), fontsize=SMALL)
    _label_rows(grid, sorted({row["m"] for row in rows}))
    return save(figure, path)


def _draw_curves(axes: Any, rows: list[Row]) -> None:
    """A curve for each method, against M."""
    for name, points in curves(rows).items():
        # auto is one of the others: it is larger, and still seen under that one's marker
        size = {"bound": 0, "auto": 7}.get(name, 4)
        look, thickness = look_of(name), 2 if name == "bound" else 1.2
        axes.plot(*zip(*points, strict=True), look.marker + "-", c=look.colour, markersize=size, linewidth=thickness)
    axes.axhline(1, color=LOOKS["sequence"].colour, linewidth=1)
    axes.grid(axis="y")


def _label_rows(grid: Any, sizes: list[int]) -> None:
    """Let all panels share an axis of M with these sizes."""
    grid[0][0].set(xscale="log", ylim=(0, None))
    grid[0][0].set_xticks(sizes, [f"{m // 1024}k" if m >= 1024 else str(m) for m in sizes])
    grid[0][0].minorticks_off()
    for axes in grid[-1]:
        axes.set_xlabel("M (rows)")


def curves(rows: list[Row]) -> dict[str, list[tuple[int, float]]]:
    """The points (M, speed-up) of every method, of async-TP and of the ceiling, by increasing M."""
    found: dict[str, list[tuple[int, float]]] = {}
    for (m,), members in sorted(_grouped(rows, "m").items()):
        for name, value in by_method(members).items():
            found.setdefault(name, []).append((m, value))
    return found


def _layers(rows: list[Row], record: Record, path: Path) -> Path:
    header = (
        f"Layers: forward and backward over their six GEMMs alone, {_ranks(record)}",
        f"Lower is better: 1.00 = all communication hidden ({PERFECT}).",
    )
    panels = _ratios(rows, "gemms_ms", dict.fromkeys(("megatron", "async_tp", "te", "te_userbuffers"), "gemms_ms"))
    return bars(panels, header, "time / GEMMs alone", path, start=1.0, limit=LONGEST)


def _blocks(rows: list[Row], record: Record, path: Path) -> Path:
    header = (
        f"Ulysses attention, forward and backward, over the same without exchanges, {_ranks(record)}",
        f"Lower is better: 1.00 = all communication hidden ({PERFECT}).",
    )
    # TransformerEngine's core attention is another one
    panels = _ratios(rows, "alone_ms", {"sequence": "alone_ms", "te": "te_alone_ms"})
    return bars(panels, header, "time / block without exchange", path, start=1.0, limit=LONGEST_BLOCK)


def _ratios(rows: list[Row], floor: str, baselines: dict[str, str]) -> dict[str, list[Bar]]:
    """A panel for each layer and length: times of methods over that of `floor`, and of baselines over one that each names."""
    panels = {}
    for (layer, seq), members in _grouped(rows, "layer", "seq").items():
        ratios = {row["method"]: row["ms"] / row[floor] for row in members}
        for name, limit in baselines.items():
            ms, alone = (members[0].get(key) for key in (f"{name}_ms", limit))
            if ms is not None and alone is not None:
                ratios[name] = ms / alone
        shown = [Bar(look_of(n).label, n, ratios[n], f"{ratios[n]:.2f}", 1.0) for n in in_order(ratios)]
        panels[f"{layer}, s = {seq}"] = shown
    return panels
