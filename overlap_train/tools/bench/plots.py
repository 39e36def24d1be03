"""Pictures of saved results, drawn beside their JSON files.

speedup.png     operators, across nodes too: bars of the speed-up over NCCL + cuBLAS, each against its bound
layers.png      layers: bars of the time over that of the six GEMMs; Ulysses: over that without exchanges
timeline.png    one call by each method (pictures/timeline.py)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..measure.cases import WEIGHTS, weight_of
from ..measure.results import Row
from ..pictures import timeline
from ..pictures.bars import Bar, Scale, bars
from ..pictures.style import PERFECT, in_order, load, look_of

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
    drawn, names = [], ("operators", "layers", "timeline")
    operators, layers, recording = (_read(folder / f"{name}.json") for name in names)
    if operators.get("rows"):
        drawn.append(draw_operators(operators, folder / "speedup.png"))
    if layers.get("rows"):
        drawn.append(draw_layers(layers, folder / "layers.png"))
    if "calls" in recording:
        drawn.append(timeline.draw(recording, folder / "timeline.png"))
    if not drawn:
        raise ValueError(
            f"{folder}: no operators.json, layers.json or timeline.json with results; run the benchmark with --out {folder} "
            "(what compare_mfu.py wrote is drawn by its --redraw)"
        )
    return drawn


def _read(path: Path) -> Record:
    return json.loads(path.read_text()) if path.exists() else {}


def draw_operators(record: Record, path: Path) -> Path:
    """A panel for each operator, pass and weight. Of several M the largest one, 8192 before others; of one weight every M. Across
    nodes only where the network had the SMs that the probe found."""
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
