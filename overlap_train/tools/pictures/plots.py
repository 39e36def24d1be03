"""Pictures of what `bench` has saved, beside its JSON.

speedup.png     operators, across nodes too: bars of the speed-up over NCCL + cuBLAS, each against its bound
layers.png      layers: bars of the time over that of the six GEMMs
timeline.png    one call by each method (timeline.py)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..measure.models import MODELS
from ..measure.results import Row, read_json
from . import timeline
from .bars import Bar, Scale, bars
from .style import in_order, load, look_of

Panels = dict[str, list[Row]]
Record = dict[str, Any]  # a JSON file: its rows, and on what they were measured
OPERATORS = {
    "ag_gemm": "all_gather_linear", "gemm_rs": "linear_reduce_scatter",
    "gemm_a2a": "linear_all_to_all", "a2a_gemm": "all_to_all_linear",
    "dgrad_ar": "linear_dgrad_all_reduce", "gemm_ar": "linear_all_reduce",
}  # fmt: skip
PASSES = {"fprop": "forward", "dgrad": "input gradient"}
BASELINES = ("megatron", "async_tp", "te", "te_userbuffers")  # drawn beside our methods
SPEED_UP = Scale("speed-up (1 = NCCL + cuBLAS)")
# Where bars are broken: one baseline at 3.4 would leave no room to compare the rest.
OVER_GEMMS = Scale("time / GEMMs alone", start=1.0, limit=2.2)


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
        record = read_json(path) if path.exists() else {}
        if record.get(key):
            drawn.append(draw_one(record, folder / f"{picture}.png"))
    if not drawn:
        raise ValueError(
            f"{folder}: no operators.json, layers.json or timeline.json with results; run the benchmark with --out {folder}"
        )
    return drawn


def draw_operators(record: Record, path: Path) -> Path:
    """A panel for each operator, pass and weight. Of several M the largest one, 8192 before others; of one weight every M."""
    rows = record["rows"]
    sizes = {row["m"] for row in rows}
    if len({frozenset((row["n"], row["k"])) for row in rows}) > 1:
        sizes = {8192 if 8192 in sizes else max(sizes)}
    panels: Panels = {}
    for row in (row for row in rows if row["m"] in sizes):
        title = f"{OPERATORS[row['op']]}\n{PASSES[row['pass']]}, M = {row['m']}\n{weight_name(row['n'], row['k'])}"
        panels.setdefault(title, []).append(row)
    header = (
        f"Operators: speed-up over NCCL + cuBLAS, {machine_of(record)}",
        "Higher is better. Line: perfect overlap, the longer of cuBLAS GEMM and NCCL alone (a faster GEMM passes it).",
    )
    drawn = {title: _bars(some, "sequence_ms", ("async_tp",), is_speed_up=True) for title, some in panels.items()}
    return bars(drawn, header, SPEED_UP, path)


def draw_layers(record: Record, path: Path) -> Path:
    """Methods and baselines over the six GEMMs of each layer."""
    panels: Panels = {}
    for row in record["rows"]:
        panels.setdefault(f"{row['layer']}, s = {row['seq']}", []).append(row)
    header = (
        f"Layers: forward and backward over their six GEMMs alone, {machine_of(record)}",
        "Lower is better. Line: the GEMMs alone; out of reach where copies take longer than the GEMMs that hide them.",
    )
    drawn = {title: _bars(some, "gemms_ms", BASELINES, is_speed_up=False) for title, some in panels.items()}
    return bars(drawn, header, OVER_GEMMS, path)


def _bars(rows: Sequence[Row], over: str, baselines: Sequence[str], is_speed_up: bool) -> list[Bar]:
    """Of one case: each method, and the baselines that ran. The ratio of their times to what is named, or the inverse."""
    first = rows[0]
    times = {name: first.get(f"{name}_ms") for name in baselines} | {row["method"]: row["ms"] for row in rows}
    ratios = {name: ms / first[over] for name, ms in times.items() if ms is not None}
    values = {name: 1 / ratios[name] if is_speed_up else ratios[name] for name in in_order(ratios)}
    bound = first.get("bound", 1.0)
    return [Bar(look_of(name).label, name, value, f"{value:.2f}", bound) for name, value in values.items()]


def weight_name(n: int, k: int) -> str:
    """The model whose MLP has a weight, and the weight's sizes. Of models that share it a Llama 3."""
    models = [name for name, model in MODELS.items() if {model.ffn_hidden_size, model.hidden_size} == {n, k}]
    model = min(models, key=lambda name: not name.startswith("llama3"), default="")
    return f"{model} {n} x {k}".strip()


def machine_of(record: Record) -> str:
    """`4 x H100`, or `2 x CPU`; and as how many nodes they were measured where these are several."""
    row, device = record["rows"][0], record.get("hardware", {}).get("device", "cpu")
    model = next((word for word in re.findall(r"\w+", device) if re.search(r"\d", word)), device.upper())
    emulated = ", emulated over loopback" if row.get("emulated", True) else ""
    nodes = f" as {row.get('nodes', 2)} nodes{emulated}" if "network_sms" in row else ""
    return f"{row['world']} x {model}{nodes}"
