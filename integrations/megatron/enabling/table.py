"""The table of a model's parallel linears: which path each takes, why, and how often each path has run."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Characters of the table's column. Every reason fits with the largest sizes; with that of an exchange it may take two lines.
REASON_WIDTH = 160


@dataclass(frozen=True)
class LinearReport:
    """One parallel linear. fprop, dgrad and wgrad say what each pass does.

    method: "fused", or "fused / chunked" where fprop and dgrad differ; "megatron" where all calls have been Megatron's own code;
        "-" before the first call, when sizes are not known yet.
    reason: why that method, of fprop and dgrad where they differ.
    overlapped_calls, fallback_calls: forward calls since the linear was enabled, recomputed ones included.
    """

    name: str
    slot: str | None  # linear slot; None: not one of the linears that this package overlaps
    fprop: str
    dgrad: str
    wgrad: str
    method: str
    reason: str
    overlapped_calls: int = 0
    fallback_calls: tuple[tuple[str, int], ...] = ()  # (reason, calls)

    @property
    def calls(self) -> str:
        """How often each path has run, in words: for example "overlapped 8" or "overlapped 8, evaluation mode 2"; empty before
        the first call."""
        overlapped = [("overlapped", self.overlapped_calls)] if self.overlapped_calls else []
        return ", ".join(f"{what} {count}" for what, count in (*overlapped, *self.fallback_calls))


@dataclass(frozen=True)
class Report:
    """All parallel linears of a model. `str()` of it is the table, with one row for each group of identical linears.

    problem: why nothing was enabled, or which linear slot is missing; None where all went as asked.
    """

    linears: tuple[LinearReport, ...]
    problem: str | None = None

    def __str__(self) -> str:
        table = [["linear", "fprop", "dgrad", "wgrad", "method", "reason", "calls"]]
        for linear in _grouped(self.linears):
            table += _rows(linear)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        notes = [] if self.problem is None else [f"overlap_train: {self.problem}"]
        return "\n".join([*notes, lines[0], "-" * len(lines[0]), *lines[1:]])


def _rows(linear: LinearReport) -> list[list[str]]:
    """The row of a linear, and below it what does not fit into the column of its reason."""
    reason, *more = textwrap.wrap(linear.reason, REASON_WIDTH, break_on_hyphens=False) or [""]
    row = [linear.name, linear.fprop, linear.dgrad, linear.wgrad, linear.method, reason, linear.calls]
    return [row, *(["", "", "", "", "", line, ""] for line in more)]


def _grouped(linears: Sequence[LinearReport]) -> list[LinearReport]:
    """One row for linears that differ in one layer index only: "decoder.layers.0-3.mlp.linear_fc1"."""
    groups: dict[LinearReport, list[int]] = {}
    for linear in linears:
        layer = re.search(r"layers\.(\d+)\.", linear.name)
        pattern = linear.name if layer is None else linear.name.replace(layer[0], "layers.*.", 1)
        groups.setdefault(replace(linear, name=pattern), []).extend([int(layer[1])] if layer else [])
    return [replace(row, name=row.name.replace("*", _ranges(layers), 1)) for row, layers in groups.items()]


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
