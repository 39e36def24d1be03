"""Plots of saved results; matplotlib is the optional extra `plot`.

speedup.png   operators: speed-up over NCCL + cuBLAS beside its bound, shape by shape
time_m.png    operators: time of each method and rival against M, one panel a shape and pass; with several M only
layers.png    layers: time over that of the six GEMMs
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .output import Row, speed_up

TALLEST = 3.2  # bounds a bar may be tall: one rival at six times the rest would flatten what is to be compared


def draw(folder: Path) -> list[Path]:
    """Draw what the JSON files of `folder` hold; the paths of the images, beside the files.

    Raises:
        ValueError: matplotlib is not installed, or the folder holds no results.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plots need matplotlib: pip install overlap-train[plot]") from None
    matplotlib.use("Agg")
    found = {name: _rows(folder / f"{name}.json") for name in ("operators", "layers")}
    if not any(found.values()):
        raise ValueError(f"{folder}: no operators.json or layers.json with rows; run the benchmark with --out {folder}")
    drawn = []
    if found["operators"]:
        drawn.append(_speed_up(found["operators"], folder / "speedup.png"))
        if len({row["m"] for row in found["operators"]}) > 1:
            drawn.append(_against_m(found["operators"], folder / "time_m.png"))
    if found["layers"]:
        drawn.append(_layers(found["layers"], folder / "layers.png"))
    return drawn


def _rows(path: Path) -> list[Row]:
    return json.loads(path.read_text())["rows"] if path.exists() else []


def methods_of(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def _speed_up(rows: list[Row], path: Path) -> Path:
    largest = max(row["m"] for row in rows)
    wanted = 8192 if any(row["m"] == 8192 for row in rows) else largest
    labels: dict[str, dict[str, Row]] = {}
    for row in (row for row in rows if row["m"] == wanted):
        labels.setdefault(f"{row['op']} {row['pass']}\n{row['n']}, {row['k']}", {})[row["method"]] = row
    series = {
        method: [speed_up(r[method]) if method in r else None for r in labels.values()] for method in methods_of(rows)
    }
    series["async-TP"] = [_async_tp(next(iter(r.values()))) for r in labels.values()]
    bounds = [next(iter(r.values()))["bound"] for r in labels.values()]
    return bars(list(labels), series, bounds, f"speed-up over NCCL + cuBLAS, M = {wanted}", path)


def _async_tp(row: Row) -> float | None:
    return None if row["async_tp_ms"] is None else row["sequence_ms"] / row["async_tp_ms"]


def _layers(rows: list[Row], path: Path) -> Path:
    labels: dict[str, dict[str, Row]] = {}
    for row in rows:
        labels.setdefault(f"{row['layer']}\ns = {row['seq']}", {})[row["method"]] = row
    series = {
        method: [r[method]["ms"] / r[method]["gemms_ms"] if method in r else None for r in labels.values()]
        for method in methods_of(rows)
    }
    for name, key in (("Megatron-Core", "megatron_ms"), ("async-TP", "async_tp_ms")):
        some = [next(iter(r.values())) for r in labels.values()]
        series[name] = [None if row[key] is None else row[key] / row["gemms_ms"] for row in some]
    return bars(list(labels), series, [1.0] * len(labels), "forward + backward over the six GEMMs alone", path)


def bars(labels: list[str], series: dict[str, list[float | None]], bounds: list[float], title: str, path: Path) -> Path:
    """Grouped bars, with a black line over each group at its bound. Bars end at TALLEST bounds; their numbers do not."""
    from matplotlib import pyplot

    # as wide as the bars need; numbers stand upright inside them, so that they run into neither each other nor the bound
    figure, axes = pyplot.subplots(figsize=(max(6, 0.18 * len(labels) * (len(series) + 1)), 4.5), layout="constrained")
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [i - 0.4 + (number + 0.5) * width for i, value in enumerate(values) if value is not None]
        known = [value for value in values if value is not None]
        drawn = axes.bar(places, heights(known, bounds), width, label=name)
        figures = [f"{value:.2f}" for value in known]
        axes.bar_label(drawn, figures, fontsize=6, rotation=90, label_type="center", color="white")
    axes.hlines(
        bounds, [i - 0.45 for i in range(len(labels))], [i + 0.45 for i in range(len(labels))], "black", label="bound"
    )
    axes.set_xticks(range(len(labels)), [_broken(label) for label in labels], fontsize=6)
    axes.margins(x=0.01)
    axes.set_title(title)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    return save(figure, path)


def heights(values: list[float], bounds: list[float]) -> list[float]:
    """Of the bars of some values, beside all bounds of the picture."""
    return [min(value, TALLEST * max(bounds)) for value in values]


def _broken(label: str) -> str:
    """With another line break at the first space of its first line."""
    first, *rest = label.split("\n")
    return "\n".join([first.replace(" ", "\n", 1), *rest])


def _against_m(rows: list[Row], path: Path) -> Path:
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    names = list(curves(rows))  # a colour each, in all panels
    sizes = sorted({row["m"] for row in rows})
    panels: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        panels.setdefault((row["op"], row["pass"], row["n"], row["k"]), []).append(row)
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(4 * columns, 3 * lines), squeeze=False, layout="constrained"
    )
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, ((op, pass_, n, k), members) in zip(grid.flat, panels.items(), strict=False):
        for name, points in curves(members).items():
            places, ms = zip(*points, strict=True)
            axes.plot(places, [1e3 * value for value in ms], f"C{names.index(name)}o-", markersize=3, label=name)
        axes.set(xscale="log", yscale="log", xlabel="M", ylabel="microseconds")
        axes.set_xticks(sizes, [str(size) for size in sizes], minor=False)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_locator(NullLocator())
        axes.tick_params(labelsize=7, which="both")
        axes.set_title(f"{op} {pass_} N={n} K={k}", fontsize=8)
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(names))
    return save(figure, path)


def curves(rows: list[Row]) -> dict[str, list[tuple[int, float]]]:
    """(M, ms) of every method and rival, by increasing M."""
    found: dict[str, dict[int, float]] = {}
    for row in sorted(rows, key=lambda row: row["m"]):
        found.setdefault(row["method"], {})[row["m"]] = row["ms"]
        for name, key in (("NCCL + cuBLAS", "sequence_ms"), ("async-TP", "async_tp_ms"), ("GEMM alone", "gemm_ms")):
            if row[key] is not None:
                found.setdefault(name, {})[row["m"]] = row[key]
    return {name: list(points.items()) for name, points in found.items()}


def save(figure: Any, path: Path) -> Path:
    """Write and close a figure; returns the path."""
    from matplotlib import pyplot

    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
