"""report(): which path each parallel linear of a model takes, why, and what its calls have done so far."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from overlap_train.choice import GATHER, SCATTER, Choice, Pass, choose
from overlap_train.integrations.megatron.fallback import standing_reason
from overlap_train.integrations.megatron.linear import OVERLAPPED
from overlap_train.registry import made_domain
from overlap_train.tuned.table import key_of, read

# How Megatron-Core names the linears in its modules -> our name of the slot.
SLOT_OF_ATTRIBUTE = {
    "linear_qkv": "qkv",
    "linear_proj": "proj",
    "linear_fc1": "fc1",
    "linear_fc2": "fc2",
    "output_layer": "output",
}


@dataclass(frozen=True)
class LinearReport:
    """One parallel linear. fprop, dgrad and wgrad say what each pass does; `method` is "fused", or "fused / chunked" where
    fprop and dgrad differ, or "megatron" where it is Megatron's own code; `reason` likewise. The calls are forward
    calls since the linear was enabled, recomputed ones included."""

    name: str
    slot: str | None  # None: not one of the linears that this package overlaps
    fprop: str
    dgrad: str
    wgrad: str
    method: str
    reason: str
    overlapped_calls: int = 0
    fallback_calls: tuple[tuple[str, int], ...] = ()  # (reason, calls)

    @property
    def calls(self) -> str:
        """For example "overlapped 8" or "overlapped 8, evaluation mode 2"; empty before the first call."""
        overlapped = [("overlapped", self.overlapped_calls)] if self.overlapped_calls else []
        return ", ".join(f"{what} {count}" for what, count in (*overlapped, *self.fallback_calls))


@dataclass(frozen=True)
class Report:
    """All parallel linears of a model; `str()` of it is the table that enable() prints, like linears in one row.

    problem: why nothing was enabled, or which slot is missing; None where all went as asked.
    """

    linears: tuple[LinearReport, ...]
    problem: str | None = None

    def __str__(self) -> str:
        columns = ["linear", "fprop", "dgrad", "wgrad", "method", "reason", "calls"]
        rows = [[x.name, x.fprop, x.dgrad, x.wgrad, x.method, x.reason, x.calls] for x in _grouped(self.linears)]
        table = [columns, *rows] if any(row[-1] for row in rows) else [row[:-1] for row in (columns, *rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        notes = [] if self.problem is None else [f"overlap_train: {self.problem}"]
        return "\n".join([*notes, lines[0], "-" * len(lines[0]), *lines[1:]])


def report(model: torch.nn.Module | Sequence[torch.nn.Module], problem: str | None = None) -> Report:
    """The parallel linears of a model, or of the chunks of a virtual pipeline, wrapped in DDP or not."""
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    linears = []
    for index, chunk in enumerate(chunks):
        prefix = f"chunk{index}." if len(chunks) > 1 else ""
        linears += [_report_linear(prefix + name, linear) for name, linear in named_linears(chunk)]
    return Report(tuple(linears), problem)


def named_linears(chunk: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of the modules in one of our slots and of all other parallel linears of Megatron's own classes.

    Names are those of the bare model: the wrappers' leading "module." is left out.
    """
    known = (*OVERLAPPED, *OVERLAPPED.values())
    for name, module in chunk.named_modules():
        if type(module) in known or (slot_of(name) is not None and hasattr(module, "weight")):
            yield re.sub(r"^(module\.)+", "", name), module


def slot_of(name: str) -> str | None:
    """ "decoder.layers.0.mlp.linear_fc1" -> "fc1"; None for a name that is no slot."""
    return SLOT_OF_ATTRIBUTE.get(name.rpartition(".")[2])


def _report_linear(name: str, linear: Any) -> LinearReport:
    slot = slot_of(name)
    if type(linear) not in OVERLAPPED.values():
        return LinearReport(name, slot, "-", "-", "-", "megatron", _why_not(linear, slot))
    overlap = linear.overlap
    counts = (overlap.overlapped_calls, tuple(sorted(overlap.fallback_calls.items())))
    reason = standing_reason(linear, linear.weight)
    if reason is not None:
        return LinearReport(name, slot, "-", "-", "-", "megatron", reason, *counts)
    fprop, dgrad = choices(linear)
    method, reason = _both(fprop.method, dgrad.method), _both(fprop.reason, dgrad.reason)
    return LinearReport(name, slot, *_passes(linear), method, reason, *counts)


def choices(linear: Any) -> tuple[Choice, Choice]:
    """How fprop and dgrad run: as decided at the linear's last new shape or, before its first call, for any M."""
    overlap, group = linear.overlap, linear.tp_group
    domain = made_domain(group)
    plans = [] if domain is None else domain.plans.values()
    # of a linear of that name with these settings; an earlier model may have had the same names
    decided = [plan for plan in plans if plan.fprop == f"{overlap.name}/fprop" and plan.config in overlap.possible]
    return decided[-1].choices if decided else expected_choices(linear)


def expected_choices(linear: Any) -> tuple[Choice, Choice]:
    """How fprop and dgrad would run for any M."""
    overlap, group = linear.overlap, linear.tp_group
    domain = made_domain(group)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = read(overlap.config.tuning_dir, key_of(device, group.size())) if domain is None else domain.table
    fprop = _fprop(linear)
    first, second = (choose(overlap.config.method, pass_, device, table) for pass_ in (fprop, fprop.dgrad))
    return first, second


def _fprop(linear: Any) -> Pass:
    """M is known at the call only. A tied output layer has no weight of its own, but knows its size."""
    if linear.weight is None:
        n, k, dtype = linear.output_size_per_partition, linear.input_size, linear.config.params_dtype
    else:
        (n, k), dtype = linear.weight.shape, linear.weight.dtype
    return Pass(SCATTER if _is_row(linear) else GATHER, None, n, k, dtype, linear.tp_group.size())


def _is_row(linear: Any) -> bool:
    """Whether it is a row linear, Megatron's or TransformerEngine's."""
    return hasattr(linear, "input_is_parallel")


def _both(fprop: str, dgrad: str) -> str:
    return fprop if fprop == dgrad else f"{fprop} / {dgrad}"


def _why_not(linear: Any, slot: str | None) -> str:
    """Why a linear is still Megatron's own."""
    if slot is None:
        return "not one of qkv, proj, fc1, fc2, output"
    if type(linear) not in OVERLAPPED:
        return f"{type(linear).__name__} is not a linear of Megatron-Core's local layer spec"
    return standing_reason(linear, linear.weight) or "not enabled"


def _passes(linear: Any) -> tuple[str, str, str]:
    """What fprop, dgrad and wgrad do."""
    if _is_row(linear):
        return "GEMM + RS", "AG(dy) + GEMM", "GEMM with the gathered dy"
    kept = linear.overlap.config.gathered_input == "keep"
    return "AG(x) + GEMM", "GEMM + RS", "GEMM with x kept" if kept else "AG(x) under dgrad, then GEMM"


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
