"""Pictures of saved results, drawn beside their JSON files.

speedup.png     operators, across nodes too: speed-up over NCCL + cuBLAS and its ceiling, shape by shape (operator_plots.py)
speedup_m.png   operators: the same against M; with several M only (size_plots.py)
layers.png      layers: time over that of the six GEMMs; Ulysses: over that without exchanges (layer_plots.py)
timeline.png    one call by each method (timeline.py)
"""

from __future__ import annotations

import json
from pathlib import Path

from ..pictures.machine import Record
from ..pictures.style import load
from . import timeline
from .layer_plots import draw_blocks, draw_layers
from .operator_plots import draw_speed_up
from .output import is_as_found
from .size_plots import draw_against_m


def draw(folder: Path) -> list[Path]:
    """Draw what the JSON files of `folder` hold; returns the images' paths.

    Raises:
        ValueError: matplotlib is not installed, or the folder holds no results.
    """
    load()
    drawn = []
    record = _read(folder / "operators.json")
    if operators := [row for row in record.get("rows", ()) if is_as_found(row)]:
        drawn.append(draw_speed_up(operators, record, folder / "speedup.png"))
        if len({row["m"] for row in operators}) > 1:
            drawn.append(draw_against_m(operators, record, folder / "speedup_m.png"))
    record = _read(folder / "layers.json")
    if rows := record.get("rows"):
        drawn.append((draw_blocks if "alone_ms" in rows[0] else draw_layers)(record, folder / "layers.png"))
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
