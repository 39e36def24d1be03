"""Recorded benchmarks as the planner reads them: operators.json, layers.json, and the tuner's winners in tune.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ...planning.table import Table, Winner
from ...planning.variants import method_of
from ...select.passes import KINDS, Pass
from ..measure.cases import Case

Row = dict[str, Any]


def rows_of(folder: Path, name: str) -> list[Row]:
    """The rows of a record. Raises ValueError where there are none."""
    rows, _ = _record(folder / name)
    if not rows:
        raise ValueError(f"{folder / name} holds no rows; record them with overlap-train bench --out {folder}")
    return rows


def _record(path: Path) -> tuple[list[Row], Row]:
    """(rows, hardware)."""
    try:
        record = json.loads(path.read_text())
        return list(record["rows"]), record.get("hardware", {})
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise ValueError(f"{path} cannot be read as a record ({failure}); name a folder that bench wrote") from failure


def holds_layers_alone(folder: Path) -> bool:
    """Whether a record has layers and no operators."""
    return (folder / "layers.json").exists() and not (folder / "operators.json").exists()


def machine_of(folder: Path, names: Iterable[str]) -> str | None:
    """The GPU of a record by one of these names: h100 for "NVIDIA H100 80GB HBM3". None: none of them."""
    _, hardware = _record(folder / ("layers.json" if holds_layers_alone(folder) else "operators.json"))
    words = re.findall(r"\w+", str(hardware.get("device", "")).lower())
    return next((name for name in names if name in words), None)


def connections_of(folder: Path) -> int | None:
    """CUDA_DEVICE_MAX_CONNECTIONS of the folder's operators.json. None: it does not say."""
    _, hardware = _record(folder / "operators.json")
    said = str(hardware.get("cuda_device_max_connections"))
    return int(said) if said.isdecimal() else None


def pass_of(row: Row) -> Pass:
    """What one rank multiplied."""
    return Case("", row["op"], row["pass"], row["m"], row["n"], row["k"]).planned(
        row["world"], getattr(torch, row["dtype"])
    )


def tuned(folder: Path, world: int) -> Table:
    """What `auto` and the variants of methods went by: the first tables of tune.md, which are those of the record."""
    path = folder / "tune.md"
    if not path.exists():
        return Table({})
    newest = "\n## ".join(path.read_text().split("\n## ")[:2])
    winners = [
        _winner(*entry, world)
        for block in re.findall(r"```\n(linear.*?)```", newest, re.S)
        for entry in _entries(block)
    ]
    return Table({winner.measured.bucket: winner for winner in winners})


def _entries(block: str) -> list[tuple[Row, str]]:
    """(row by heading, winner) of every line; headings come again where another table begins."""
    found, headings = [], []
    for line in block.splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        if cells[0] == "linear":
            headings = cells
        elif len(cells) == len(headings):
            row = dict(zip(headings, cells, strict=True))
            found.append((row, row["winner"]))
    return found


def _winner(row: Row, winner: str, world: int) -> Winner:
    m, n, k = (int(size) for size in row["M, N, K"].split(","))
    assert row["kind"] in KINDS, row
    times = {name.removesuffix(" ms"): cell for name, cell in row.items() if name.endswith(" ms") and cell != "-"}
    ms = {name: float(cell) for name, cell in times.items()}
    return Winner(Pass(row["kind"], m, n, k, torch.bfloat16, world), method_of(winner), ms)
