"""Pictures of saved results, drawn beside their JSON files.

speedup.png     operators, across nodes too: bars of the speed-up over NCCL + cuBLAS, each against its bound
layers.png      layers: bars of the time over that of the six GEMMs; Ulysses: over that without exchanges
timeline.png    one call by each method (timeline.py)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..measure.results import Row, ranks_of
from ..measure.shapes import WEIGHTS, weight_of
from ..pictures.bars import Bar, Scale, bars
from ..pictures.style import PERFECT, in_order, load, look_of
from . import timeline
from .output import is_as_found, speed_up

Record = dict[str, Any]  # a JSON file: its rows, and on what they were measured
Panels = dict[str, list[Bar]]
OPERATORS = {
    "ag_gemm": "all_gather_linear",
    "gemm_rs": "linear_reduce_scatter",
    "gemm_a2a": "linear_all_to_all",
    "a2a_gemm": "all_to_all_linear",
}
PASSES = {"fprop": "forward", "dgrad": "input gradient"}
BESIDE = ("async_tp", "three_gemms", "by_nodes")  # baselines of operators, beside the sequence
OVER_GEMMS = dict.fromkeys(("megatron", "async_tp", "te", "te_userbuffers", "tuned"), "gemms_ms")
# TransformerEngine's core attention is another one
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
    drawn = []
    record = _read(folder / "operators.json")
    if rows := [row for row in record.get("rows", ()) if is_as_found(row)]:
        drawn.append(draw_operators(rows, record, folder / "speedup.png"))
    record = _read(folder / "layers.json")
    if record.get("rows"):
        drawn.append(draw_layers(record, folder / "layers.png"))
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


def draw_operators(rows: list[Row], record: Record, path: Path) -> Path:
    """A panel for each operator, pass and weight. Of several M the largest one, 8192 before others; of one weight every M."""
    sizes = {row["m"] for row in rows}
    if len({frozenset((row["n"], row["k"])) for row in rows}) > 1:
        sizes = {8192 if 8192 in sizes else max(sizes)}
    panels = {}
    for (op, pass_, m, n, k), members in grouped(rows, "op", "pass", "m", "n", "k").items():
        if m in sizes:
            panels[f"{OPERATORS[op]}\n{PASSES[pass_]}, M = {m}\n{weight_name(n, k)}"] = _speed_ups(members)
    header = (
        f"Operators: speed-up over NCCL + cuBLAS, {machine_of(record)}",
        f"Higher is better. {PERFECT.capitalize()}: the longer of cuBLAS GEMM and NCCL alone (a faster GEMM passes it).",
    )
    return bars(panels, header, SPEED_UP, path)


def _speed_ups(rows: list[Row]) -> list[Bar]:
    """The bars of one case: baselines that ran, and each method."""
    first = rows[0]
    found = {name: first["sequence_ms"] / first[f"{name}_ms"] for name in BESIDE if first.get(f"{name}_ms") is not None}
    found |= {row["method"]: speed_up(row) for row in rows}
    return [
        Bar(look_of(name).label, name, found[name], f"{found[name]:.2f}", first["bound"]) for name in in_order(found)
    ]


def draw_layers(record: Record, path: Path) -> Path:
    """Methods and baselines over the six GEMMs of each layer; of Ulysses over the same block without exchanges."""
    if "alone_ms" in record["rows"][0]:
        header = (
            f"Ulysses attention, forward and backward, over the same without exchanges, {machine_of(record)}",
            "Lower is better. 1.00: the same block without exchanges.",
        )
        return bars(_ratios(record["rows"], "alone_ms", OVER_BLOCK), header, BLOCKS, path)
    header = (
        f"Layers: forward and backward over their six GEMMs alone, {machine_of(record)}",
        "Lower is better. 1.00: the GEMMs alone; out of reach where copies take longer than the GEMMs that hide them.",
    )
    return bars(_ratios(record["rows"], "gemms_ms", OVER_GEMMS), header, LAYERS, path)


def _ratios(rows: list[Row], floor: str, baselines: dict[str, str]) -> Panels:
    """A panel for each layer and length: times of methods over that of `floor`, and of baselines over one that each names."""
    panels = {}
    for (layer, seq), members in grouped(rows, "layer", "seq").items():
        ratios = {row["method"]: row["ms"] / row[floor] for row in members}
        for name, limit in baselines.items():
            ms, alone = (members[0].get(key) for key in (f"{name}_ms", limit))
            if ms is not None and alone is not None:
                ratios[name] = ms / alone
        shown = [Bar(look_of(n).label, n, ratios[n], f"{ratios[n]:.2f}", 1.0) for n in in_order(ratios)]
        panels[f"{layer}, s = {seq}"] = shown
    return panels


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by their values of these keys, in the order in which the first of each comes."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def weight_name(n: int, k: int) -> str:
    """The model that a weight belongs to, and the weight's sizes. Of models that share it a Llama 3."""
    models = [name for name in WEIGHTS if set(weight_of(name)) == {n, k}]
    model = min(models, key=lambda name: not name.startswith("llama3"), default="")
    return f"{model} {n} x {k}".strip()


def machine_of(record: Record) -> str:
    """`4 x H100`, or `2 CPU processes`; and as how many nodes they were measured where these are several."""
    row, found = record["rows"][0], record.get("hardware", {})
    device, nodes = found.get("device", "cpu"), row.get("nodes", 2 if "network_sms" in row else 1)
    model = next((word for word in re.findall(r"\w+", device) if re.search(r"\d", word)), device)
    gpus = ranks_of(found, row["world"]) if device == "cpu" else f"{row['world']} x {model}"
    emulated = ", emulated over loopback" if row.get("emulated", True) else ""
    return f"{gpus} as {nodes} nodes{emulated}" if nodes > 1 else gpus
