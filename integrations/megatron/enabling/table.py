"""The table of a model's parallel linears: which path each takes, why, and how often each path has run."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Characters of a line, unless names, methods and calls leave less than REASON_WIDTH to the reasons.
WIDTH, REASON_WIDTH = 120, 40


@dataclass(frozen=True)
class LinearReport:
    """One parallel linear. fprop, dgrad and wgrad say what each pass does.

    method: "fused", or "fused / chunked" where fprop and dgrad differ; "megatron" where all calls have been Megatron's own code;
        "-" before the first call, when sizes are not known yet. It is that of the last call which the host made: a CUDA graph
        goes on with what it has captured.
    reason: why that method, of fprop and dgrad where they differ.
    overlapped_calls, fallback_calls: forward calls by our operators and by Megatron's own code since the linear was enabled,
        recomputed ones included. Those of the method collective are among our operators'.
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
    def is_collective(self) -> bool:
        """Whether our operators run this linear with the method collective in both passes: it hides no communication, but for
        NCCL beside GEMMs where a column linear's backward has two, as in Megatron-Core."""
        return self.method == "collective"

    @property
    def calls(self) -> str:
        """How often each path has run, in words: for example "overlapped 8", "not overlapped 8" of the method collective, or
        "overlapped 8, evaluation mode 2"; empty before the first call."""
        ours = "not overlapped" if self.is_collective else "overlapped"
        counts = [(ours, self.overlapped_calls)] if self.overlapped_calls else []
        return ", ".join(f"{what} {count}" for what, count in (*counts, *self.fallback_calls))


@dataclass(frozen=True)
class Report:
    """All parallel linears of a model. `str()` of it is the table: one row for each group of identical linears, then the passes.

    problem: why nothing was enabled, or which linear slot is missing; None where all went as asked.
    """

    linears: tuple[LinearReport, ...]
    problem: str | None = None

    def __str__(self) -> str:
        rows = _grouped(self.linears)
        heading, *lines = _lines(rows)
        rule = "-" * max(map(len, (heading, *lines)))
        passes = _passes(rows)
        notes = [] if self.problem is None else [f"overlap_train: {self.problem}"]
        return "\n".join([*notes, heading, rule, *lines, *([rule, *passes] if passes else [])])


def _lines(rows: Sequence[LinearReport]) -> list[str]:
    """The heading and the rows. A reason that does not fit into its column goes on in the next line."""
    cells = [("linear", "method", "calls"), *((row.name, row.method, row.calls) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    indent = " " * (sum(widths) + 2 * len(widths))
    wrapper = textwrap.TextWrapper(max(WIDTH, len(indent) + REASON_WIDTH), break_on_hyphens=False)
    wrapper.subsequent_indent = indent
    lines = []
    for row, reason in zip(cells, ("reason", *(row.reason for row in rows)), strict=True):
        wrapper.initial_indent = "".join(f"{cell:{width}}  " for cell, width in zip(row, widths, strict=True))
        lines += wrapper.wrap(reason) or [wrapper.initial_indent.rstrip()]
    return lines


def _passes(rows: Sequence[LinearReport]) -> list[str]:
    """What the passes do, in a line for all linears that do the same. A slot whose linears differ is named by its linears."""
    overlapped = [(row, (row.fprop, row.dgrad, row.wgrad)) for row in rows if row.fprop != "-"]
    kinds = Counter(slot for slot, _ in {(row.slot, passes) for row, passes in overlapped})
    named: dict[tuple[str, str, str], list[str]] = {}
    for row, passes in overlapped:
        named.setdefault(passes, []).append(row.slot if row.slot and kinds[row.slot] == 1 else row.name)
    return [
        f"{', '.join(dict.fromkeys(names))}: fprop {fprop}; dgrad {dgrad}; wgrad {wgrad}"
        for (fprop, dgrad, wgrad), names in named.items()
    ]


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
