"""Results as JSON, as a Markdown table and as a compact table on the screen.

A file is {"hardware", "versions", "date", "rows"}. Rows keep all digits; tables round.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

OPERATOR_KEYS = (
    "op", "pass", "world", "m", "n", "k", "dtype", "method", "ms", "host_us", "sequence_ms", "async_tp_ms", "gemm_ms",
    "comm_ms", "bound",
)  # fmt: skip
LAYER_KEYS = ("layer", "world", "seq", "method", "ms", "megatron_ms", "async_tp_ms", "gemms_ms", "host_us")

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], Any]]


@dataclass
class Results:
    """Rows as they come in; `path` (None except on rank 0) is rewritten after each addition: nothing is lost."""

    path: Path | None = None
    hardware: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: bool = False

    def add(self, rows: list[Row]) -> None:
        self.rows += rows
        if self.path is not None:
            write_json(self.path, self.rows, self.hardware)

    def note(self, text: str, failure: bool) -> None:
        """failure: one of our own methods, or the yardstick itself, went wrong."""
        self.notes.append(("FAILED " if failure else "") + text)
        self.failed |= failure


def write_json(path: Path, rows: list[Row], hardware: dict[str, Any]) -> None:
    """Atomically, so that an interrupted run leaves a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "hardware": hardware,
        "versions": versions(),
        "date": datetime.now(UTC).isoformat("T", "seconds"),
        "rows": rows,
    }
    scratch = path.with_suffix(".json.tmp")
    scratch.write_text(json.dumps(document, indent=1) + "\n")
    scratch.replace(path)


def hardware(device: torch.device, world: int) -> dict[str, Any]:
    """What the figures depend on besides the software."""
    found: dict[str, Any] = {"world": world, "host": platform.machine(), "cpus": os.cpu_count()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "sms": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
        found["cuda_device_max_connections"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default")
    else:
        found["device"] = "cpu"
    return found


def versions() -> dict[str, str]:
    """Of everything that takes part; a package that is not installed is left out."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda is not None and torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        driver = Path("/proc/driver/nvidia/version")
        if driver.exists():
            found["driver"] = driver.read_text().splitlines()[0]
    for package in ("triton", "megatron-core", "nvshmem4py-cu13", "nvidia-nvshmem-cu13", "overlap-train"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def speed_up(row: Row) -> float:
    """Over NCCL + cuBLAS."""
    return row["sequence_ms"] / row["ms"]


def _over(row: Row, rival: str) -> float | None:
    return None if row[rival] is None else row[rival] / row["ms"]


OPERATOR_COLUMNS: tuple[Column, ...] = (
    ("op", lambda row: row["op"]),
    ("pass", lambda row: row["pass"]),
    ("M, N, K", lambda row: f"{row['m']}, {row['n']}, {row['k']}"),
    ("method", lambda row: row["method"]),
    ("ms", lambda row: row["ms"]),
    ("host µs", lambda row: round(row["host_us"])),
    ("GEMM", lambda row: row["gemm_ms"]),
    ("comm", lambda row: row["comm_ms"]),
    ("sequence", lambda row: row["sequence_ms"]),
    ("async-TP", lambda row: row["async_tp_ms"]),
    ("speed-up", speed_up),
    ("bound", lambda row: row["bound"]),
    ("speed-up/bound", lambda row: speed_up(row) / row["bound"]),
    ("vs async-TP", lambda row: _over(row, "async_tp_ms")),
)
LAYER_COLUMNS: tuple[Column, ...] = (
    ("layer", lambda row: row["layer"]),
    ("s", lambda row: row["seq"]),
    ("method", lambda row: row["method"]),
    ("ms", lambda row: row["ms"]),
    ("host µs", lambda row: round(row["host_us"])),
    ("GEMMs", lambda row: row["gemms_ms"]),
    ("Megatron-Core", lambda row: row["megatron_ms"]),
    ("async-TP", lambda row: row["async_tp_ms"]),
    ("ms/GEMMs", lambda row: row["ms"] / row["gemms_ms"]),
    ("Megatron-Core/GEMMs", lambda row: None if row["megatron_ms"] is None else row["megatron_ms"] / row["gemms_ms"]),
    ("vs Megatron-Core", lambda row: _over(row, "megatron_ms")),
)


def columns_of(rows: list[Row]) -> tuple[Column, ...]:
    return LAYER_COLUMNS if rows and "layer" in rows[0] else OPERATOR_COLUMNS


def cells(rows: list[Row], columns: tuple[Column, ...] | None = None) -> list[list[str]]:
    """The table as text, headings first. Numbers have three digits after the point below 10, two above.

    columns: None for those of the benchmark that the rows come from.
    """
    columns = columns or columns_of(rows)
    return [[heading for heading, _ in columns], *([_cell(value(row)) for _, value in columns] for row in rows)]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return (f"{value:.3f}" if value < 10 else f"{value:.2f}") if isinstance(value, float) else str(value)


def markdown(rows: list[Row], notes: list[str], columns: tuple[Column, ...] | None = None) -> str:
    heading, *body = cells(rows, columns)
    lines = [heading, ["---"] * len(heading), *body]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n\n".join([text, *summary(rows), *(f"- {note}" for note in notes)]) + "\n"


def screen(rows: list[Row], notes: list[str], columns: tuple[Column, ...] | None = None) -> str:
    """Aligned columns, the summary, then the notes."""
    table = cells(rows, columns)
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in table]
    return "\n".join([*lines, *summary(rows), *notes])


def summary(rows: list[Row]) -> list[str]:
    """For each method and pass: the lowest figure and the geometric mean of the ratio that the goals are about."""
    if not rows or "bound" not in rows[0]:
        return []
    groups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["pass"]), []).append(speed_up(row) / row["bound"])
    return [
        f"{method} {pass_}: speed-up/bound lowest {min(ratios):.3f}, "
        f"geometric mean {statistics.geometric_mean(ratios):.3f} over {len(ratios)} shapes"
        for (method, pass_), ratios in groups.items()
    ]


def collect_notes(results: Results, group: dist.ProcessGroup) -> None:
    """Notes of all ranks on every rank, without repeats: an error's text may be on one rank only."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, results.notes, group=group)
    results.notes = list(dict.fromkeys(note for notes in everyone for note in notes))
