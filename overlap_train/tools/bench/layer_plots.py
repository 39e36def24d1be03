"""layers.png: bars of whole layers, and of Ulysses attention blocks, over the same without communication."""

from __future__ import annotations

from pathlib import Path

from ..pictures.bars import Bar, Scale, bars
from ..pictures.machine import Record, machine_of
from ..pictures.style import in_order, look_of
from .operator_plots import grouped
from .output import Row

# Where bars are broken: one baseline at 3.4 would leave no room to compare the rest. Most blocks differ by some per cent.
LAYERS = Scale("time / GEMMs alone", start=1.0, limit=2.2, line="alone")
BLOCKS = Scale("time / block without exchanges", start=1.0, limit=1.25, line="no_exchange")
OVER_GEMMS = ("megatron", "async_tp", "te", "te_userbuffers", "tuned")  # beside the methods


def draw_layers(record: Record, path: Path) -> Path:
    """Methods and baselines over the six GEMMs of each layer."""
    header = (
        f"Layers: forward and backward over their six GEMMs alone, {machine_of(record)}",
        "Lower is better. 1.00: the GEMMs alone; out of reach where copies take longer than the GEMMs that hide them.",
    )
    return bars(_ratios(record["rows"], "gemms_ms", dict.fromkeys(OVER_GEMMS, "gemms_ms")), header, LAYERS, path)


def draw_blocks(record: Record, path: Path) -> Path:
    """Methods and baselines over the same block without exchanges."""
    header = (
        f"Ulysses attention, forward and backward, over the same without exchanges, {machine_of(record)}",
        "Lower is better. 1.00: the same block without exchanges.",
    )
    # TransformerEngine's core attention is another one
    panels = _ratios(record["rows"], "alone_ms", {"sequence": "alone_ms", "te": "te_alone_ms"})
    return bars(panels, header, BLOCKS, path)


def _ratios(rows: list[Row], floor: str, baselines: dict[str, str]) -> dict[str, list[Bar]]:
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
