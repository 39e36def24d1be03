"""Pictures of what `bench` has saved, beside its JSON: panels of bars, each with its number, against a bound; and timelines.

speedup.png     operators, across nodes too: bars of the speed-up over NCCL + cuBLAS, each against its bound
layers.png      layers: bars of the time over that of the six GEMMs; Ulysses: over that without exchanges
timeline.png    one call by each method (timeline.py)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..measure.cases import WEIGHTS, weight_of
from ..measure.results import Row
from . import timeline
from .style import GRAPH, PERFECT, SMALL, canvas, in_order, load, look_of, save

Panels = dict[str, list[Row]]
Record = dict[str, Any]  # a JSON file: its rows, and on what they were measured
OPERATORS = {
    "ag_gemm": "all_gather_linear", "gemm_rs": "linear_reduce_scatter",
    "gemm_a2a": "linear_all_to_all", "a2a_gemm": "all_to_all_linear",
}  # fmt: skip
PASSES = {"fprop": "forward", "dgrad": "input gradient"}
# Baselines beside our methods, and by what each is divided. TransformerEngine's core attention is another one.
OVER_SEQUENCE = dict.fromkeys(("async_tp", "three_gemms", "by_nodes"), "sequence_ms")
OVER_GEMMS = dict.fromkeys(("megatron", "async_tp", "te", "te_userbuffers", "tuned"), "gemms_ms")
OVER_BLOCK = {"sequence": "alone_ms", "te": "te_alone_ms"}
BAR = 0.21  # inches, with the gap to the next
LINE = 0.17  # inches of each further line of a title


@dataclass(frozen=True)
class Bar:
    """One bar of a panel. name: of style.look_of. bound: where the line is that this bar is held against; None where that is
    not known."""

    label: str
    name: str
    value: float
    text: str
    bound: float | None


@dataclass(frozen=True)
class Scale:
    """The axis of all panels: where bars start, where longer ones are broken, and what the line of the bounds is, as
    style.look_of knows it."""

    unit: str
    start: float = 0.0
    limit: float = float("inf")
    line: str = "bound"


def bars(panels: Mapping[str, Sequence[Bar]], header: tuple[str, ...], scale: Scale, path: Path) -> Path:
    """Panels of bars that lie, each with its number. A bar beyond the limit is broken: it ends there with a mark."""
    most, everything = max(len(some) for some in panels.values()), [bar for some in panels.values() for bar in some]
    columns = min(len(panels), 2)
    bounds = [bar.bound for bar in everything if bar.bound is not None]
    height = BAR * most + 0.7 + LINE * max(title.count("\n") for title in panels)
    figure, grid = canvas(len(panels), columns, height, header, (scale.line,) if bounds else (), sharex=True)
    ends = [min(bar.value, scale.limit) for bar in everything]
    length, farthest = max(ends) - scale.start, max(bounds, default=scale.start) - scale.start
    grid[0][0].set_xlim(min(scale.start, *ends) - 0.01 * length, scale.start + max(1.3 * length, 1.15 * farthest))
    for axes, (title, some) in zip(grid.flat, panels.items(), strict=False):
        for place, bar in enumerate(some):
            _draw_bar(axes, place, bar, scale)
        axes.set(title=title, ylim=(most - 0.4, -0.6))
        axes.set_yticks(range(len(some)), [bar.label for bar in some])
        axes.tick_params(left=False, labelbottom=True)
    for axes in grid[-1]:
        axes.set_xlabel(scale.unit)
    return save(figure, path)


def _draw_bar(axes: Any, place: int, bar: Bar, scale: Scale) -> None:
    start, limit, end = scale.start, scale.limit, min(bar.value, scale.limit)
    strength = 0.6 if GRAPH in bar.name else 1.0
    axes.barh(place, end - start, 0.78, left=start, color=look_of(bar.name).colour, alpha=strength)
    if bar.value > limit:
        axes.text(end - 0.06 * (limit - start), place, "//", color="white", weight="bold", ha="center", va="center")
    # the number stands at the bar's end, or beyond the bound if that would cross it
    left, right = axes.get_xlim()
    is_near = bar.bound is not None and end <= bar.bound < end + 0.3 * (right - left)
    axes.text(bar.bound if is_near else end, place, f"  {bar.text}", va="center", fontsize=SMALL)
    if bar.bound is not None:
        axes.vlines(bar.bound, place - 0.5, place + 0.5, "black", linewidth=1.5, zorder=4)


SPEED_UP = Scale("speed-up (1 = NCCL + cuBLAS)")
# Where bars are broken: one baseline at 3.4 would leave no room to compare the rest. Most blocks differ by some per cent.
LAYERS = Scale("time / GEMMs alone", start=1.0, limit=2.2, line="alone")
BLOCKS = Scale("time / block without exchanges", start=1.0, limit=1.25, line="no_exchange")


def draw(folder: Path) -> list[Path]:
    """Draw what the JSON files of `folder` hold; returns the images' paths.

    Raises:
        ValueError: matplotlib is not installed, or the folder holds no results.
    """
    load()
    drawn = []
    for name, key, draw_one, picture in (
        ("operators", "rows", draw_operators, "speedup"),
        ("layers", "rows", draw_layers, "layers"),
        ("timeline", "calls", timeline.draw, "timeline"),
    ):
        path = folder / f"{name}.json"
        record = json.loads(path.read_text()) if path.exists() else {}
        if record.get(key):
            drawn.append(draw_one(record, folder / f"{picture}.png"))
    if not drawn:
        raise ValueError(
            f"{folder}: no operators.json, layers.json or timeline.json with results; run the benchmark with --out {folder} "
            "(what compare_mfu.py wrote is drawn by its --redraw)"
        )
    return drawn


def draw_operators(record: Record, path: Path) -> Path:
    """A panel for each operator, pass and weight. Of several M the largest one, 8192 before others; of one weight every M. Across
    nodes only where the network had the SMs that it has by default."""
    rows = [row for row in record["rows"] if row.get("network_sms") == row.get("probe_sms")]
    sizes = {row["m"] for row in rows}
    if len({frozenset((row["n"], row["k"])) for row in rows}) > 1:
        sizes = {8192 if 8192 in sizes else max(sizes)}
    panels: Panels = {}
    for row in (row for row in rows if row["m"] in sizes):
        title = f"{OPERATORS[row['op']]}\n{PASSES[row['pass']]}, M = {row['m']}\n{weight_name(row['n'], row['k'])}"
        panels.setdefault(title, []).append(row)
    title = f"Operators: speed-up over NCCL + cuBLAS, {machine_of(record)}"
    meaning = f"{PERFECT.capitalize()}: the longer of cuBLAS GEMM and NCCL alone (a faster GEMM passes it)."
    drawn = {name: _bars(some, "sequence_ms", OVER_SEQUENCE, is_speed_up=True) for name, some in panels.items()}
    return bars(drawn, (title, f"Higher is better. {meaning}"), SPEED_UP, path)


def draw_layers(record: Record, path: Path) -> Path:
    """Methods and baselines over the six GEMMs of each layer; of Ulysses over the same block without exchanges."""
    panels: Panels = {}
    for row in record["rows"]:
        panels.setdefault(f"{row['layer']}, s = {row['seq']}", []).append(row)
    if "alone_ms" in record["rows"][0]:
        over, scale, meaning = ("alone_ms", OVER_BLOCK), BLOCKS, "the same block without exchanges"
        title = "Ulysses attention, forward and backward, over the same without exchanges"
    else:
        over, scale, title = ("gemms_ms", OVER_GEMMS), LAYERS, "Layers: forward and backward over their six GEMMs alone"
        meaning = "the GEMMs alone; out of reach where copies take longer than the GEMMs that hide them"
    header = (f"{title}, {machine_of(record)}", f"Lower is better. 1.00: {meaning}.")
    return bars({name: _bars(some, *over) for name, some in panels.items()}, header, scale, path)


def _bars(rows: Sequence[Row], over: str, baselines: Mapping[str, str], is_speed_up: bool = False) -> list[Bar]:
    """The bars of one case: the time of each method and of baselines that ran, over what is named; or the inverse."""
    first = rows[0]
    pairs = {name: (first.get(f"{name}_ms"), first.get(key)) for name, key in baselines.items()}
    ratios = {name: ms / other for name, (ms, other) in pairs.items() if ms is not None and other is not None}
    ratios |= {row["method"]: row["ms"] / row[over] for row in rows}
    values = {name: 1 / ratios[name] if is_speed_up else ratios[name] for name in in_order(ratios)}
    bound = first.get("bound", 1.0)
    return [Bar(look_of(name).label, name, value, f"{value:.2f}", bound) for name, value in values.items()]


def weight_name(n: int, k: int) -> str:
    """The model that a weight belongs to, and the weight's sizes. Of models that share it a Llama 3."""
    models = [name for name in WEIGHTS if set(weight_of(name)) == {n, k}]
    model = min(models, key=lambda name: not name.startswith("llama3"), default="")
    return f"{model} {n} x {k}".strip()


def machine_of(record: Record) -> str:
    """`4 x H100`, or `2 x CPU`; and as how many nodes they were measured where these are several."""
    row, device = record["rows"][0], record.get("hardware", {}).get("device", "cpu")
    model = next((word for word in re.findall(r"\w+", device) if re.search(r"\d", word)), device.upper())
    emulated = ", emulated over loopback" if row.get("emulated", True) else ""
    nodes = f" as {row.get('nodes', 2)} nodes{emulated}" if "network_sms" in row else ""
    return f"{row['world']} x {model}{nodes}"
