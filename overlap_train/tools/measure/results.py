"""Results as JSON, as a Markdown table and as aligned text.

A file is {"hardware", "versions", "date", "rows"}. Rows keep all digits; tables round.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...select.table import installed

Row = dict[str, Any]
Columns = Sequence[tuple[str, Callable[[Row], Any]]]  # heading, and what stands below it
_PACKAGES = "triton megatron-core nvshmem4py-cu13 nvidia-nvshmem-cu13 transformer-engine overlap-train"


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
        """Add a note. failure: one of our own methods, or what all are compared with, went wrong."""
        self.notes.append(f"FAILED {text}" if failure else text)
        self.failed |= failure

    def share_notes(self, group: dist.ProcessGroup) -> None:
        """Notes of all ranks on every rank, without repeats: an error's text may be on one rank only. Collective."""
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, self.notes, group=group)
        self.notes = list(dict.fromkeys(note for notes in everyone for note in notes))


def write_json(path: Path, rows: list[Row], hardware: dict[str, Any]) -> None:
    """Write results as JSON, a line for each row, atomically: an interrupted run leaves a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    date = datetime.now(UTC).isoformat("T", "seconds")
    scratch = path.with_suffix(".json.tmp")
    scratch.write_text(in_lines({"hardware": hardware, "versions": versions(), "date": date, "rows": rows}))
    scratch.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """What write_json has written. Raises ValueError, with the path, for what is no JSON."""
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: no JSON as bench writes it ({error})") from None
    return document


def in_lines(document: dict[str, Any]) -> str:
    """As JSON: a line for each key, or, where a list stands there, for each of its items."""

    def text(value: Any) -> str:
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]" if isinstance(value, list) else json.dumps(value)

    return "{\n" + ",\n".join(f"{json.dumps(key)}: {text(value)}" for key, value in document.items()) + "\n}\n"


def hardware(device: torch.device, world: int) -> dict[str, Any]:
    """What the figures depend on besides the software."""
    found: dict[str, Any] = {"world": world, "host": platform.machine(), "cpus": os.cpu_count(), "device": "cpu"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = properties.name
        found |= {"sms": properties.multi_processor_count, "memory_bytes": properties.total_memory}
        found["cuda_device_max_connections"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default")
    return found


def versions() -> dict[str, str]:
    """The versions of everything that takes part; a package that is not installed is left out."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda is not None and torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        driver = Path("/proc/driver/nvidia/version")
        if driver.exists():
            found["driver"] = driver.read_text().splitlines()[0]
    return found | {name: version for name in _PACKAGES.split() if (version := installed(name)) is not None}


def cell(value: Any) -> str:
    """A dash for None. Numbers have three digits after the point below 10, two above."""
    if value is None:
        return "-"
    return (f"{value:.3f}" if value < 10 else f"{value:.2f}") if isinstance(value, float) else str(value)


def markdown(rows: list[Row], notes: Sequence[str], columns: Columns) -> str:
    """The table, then the notes as a list."""
    heading, *body = _cells(rows, columns)
    text = "\n".join("| " + " | ".join(line) + " |" for line in (heading, ["---"] * len(heading), *body))
    return "\n\n".join([text, *(f"- {note}" for note in notes)]) + "\n"


def screen(rows: list[Row], notes: Sequence[str], columns: Columns) -> str:
    """Aligned columns, then the notes."""
    return "\n".join([*aligned(_cells(rows, columns)), *notes])


def _cells(rows: list[Row], columns: Columns) -> list[list[str]]:
    """The table as text, headings first."""
    return [[heading for heading, _ in columns], *([cell(value(row)) for _, value in columns] for row in rows)]


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table: names to the left, numbers to the right."""
    texts = []
    for index, column in enumerate(zip(*table, strict=True)):
        width, is_name = max(map(len, column)), not index or column[-1][:1].isalpha()
        texts.append([text.ljust(width) if is_name else text.rjust(width) for text in column])
    return ["  ".join(line).rstrip() for line in zip(*texts, strict=True)]
