"""`overlap-train plan --check`: the estimate of every recorded row beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ...select.choose import alone, choose
from ...select.cost import Estimate, library_us, reach_of
from ...select.method import Pass
from ...select.system import System, system_of
from ...select.table import UNTUNED
from ..measure.cases import ALL_REDUCES, LAYERS, PASSES, Case
from ..measure.results import Row, aligned, read_json
from .prediction import COLLECTIVE, in_a_row

WORST, MEAN = 0.25, 0.12  # what is aimed at: of one figure, in the mean
_OTHERS = ("network_sms", "fp8", "graphs")  # rows that have one of these are not estimated


class Compared(NamedTuple):
    """One figure of a record, estimated and measured. what: a method, or which half of the work alone."""

    case: str
    what: str
    estimated_us: float
    measured_us: float

    @property
    def error(self) -> float:
        """+0.1: the estimate is 10 % too long."""
        return self.estimated_us / self.measured_us - 1


def compare(folder: Path, system: System | None = None) -> list[Compared]:
    """Every row of the folder's operators.json and layers.json. system: None: that of the record.

    Raises:
        ValueError: there is neither, or the GPU is not known.
    """
    found: list[Compared] = []
    for path, of_rows in ((folder / "operators.json", _operators), (folder / "layers.json", _layers)):
        if not path.exists():
            continue
        record = read_json(path)
        on = system or system_of(record["hardware"]["device"])
        if on is None:
            raise ValueError(f"--check {folder}: recorded on a GPU that is not known; add --system")
        found += [one._replace(case=f"{folder.name} {one.case}") for one in of_rows(record["rows"], on)]
    if not found:
        raise ValueError(
            f"--check {folder}: no row of operators.json or layers.json there can be estimated; name a folder that bench wrote"
        )
    return found


def _operators(rows: list[Row], system: System) -> list[Compared]:
    """Rows of `bench operators`, each half of the work once a shape. Emulated networks between nodes are not estimated, nor what
    all-reduces, what is in fp8, and CUDA graphs."""
    found: dict[tuple[str, str], Compared] = {}
    for row in (row for row in rows if row.keys().isdisjoint(_OTHERS) and row["op"] not in ALL_REDUCES):
        case = f"{row['op']} {row['pass']} {row['m']}, {row['n']}, {row['k']}"
        measured = Case("", row["op"], row["pass"], row["m"], row["n"], row["k"])
        p = measured.planned(row["world"], getattr(torch, row["dtype"]))
        for what, us, ms in (
            (row["method"], _alone(row["method"], p, system).us, row["ms"]),
            ("gemm", library_us(system, p.rows, p.n, p.k), row["gemm_ms"]),
            ("comm", reach_of(1).collective_us(p, system), row["comm_ms"]),
            ("sequence", _alone(COLLECTIVE, p, system).device_us, row["sequence_ms"]),
        ):
            found.setdefault((case, what), Compared(case, what, us, 1e3 * ms))
    return list(found.values())


def _alone(method: str, p: Pass, system: System) -> Estimate:
    """An operator with nothing after it."""
    return reach_of(1).estimate(p, alone(choose(method, p, system, UNTUNED), p, system).how, system)


def _layers(rows: list[Row], system: System) -> list[Compared]:
    """Forward and backward of two linears. Attention blocks of Ulysses, which have a core attention, are not estimated."""
    found: dict[tuple[str, str], Compared] = {}
    for row in (row for row in rows if row["layer"] in LAYERS):
        case, method = f"{row['layer']} s={row['seq']}", row["method"]
        for what, us, ms in (
            (method, _layer(row, method.removesuffix("_graph"), system), row["ms"]),
            ("megatron", _layer(row, COLLECTIVE, system), row["megatron_ms"]),
        ):
            # As a graph the host takes no part, and Megatron-Core's is ahead.
            taken = us.device_us if what == "megatron" or what.endswith("_graph") else us.us
            found.setdefault((case, what), Compared(case, what, taken, 1e3 * ms))
    return list(found.values())


def _layer(row: Row, method: str, system: System) -> Estimate:
    (column, scattered), parts = LAYERS[row["layer"]], []
    for op, (n, k) in (("ag_gemm", column), ("gemm_rs", scattered)):
        for pass_ in PASSES:
            p = Case("", op, pass_, row["seq"], n, k).planned(row["world"], torch.bfloat16)
            how = choose(method, p, system, UNTUNED).how
            parts.append(reach_of(1).estimate(p, how, system, backward=pass_ == "dgrad"))
    return in_a_row(parts)


def report(compared: Sequence[Compared]) -> list[str]:
    """What the command prints: errors by what was measured, then rows that miss."""
    table = [("what", "figures", "mean error", "worst")]
    for what in [*dict.fromkeys(one.what for one in compared), "all"]:
        some = [one for one in compared if what in ("all", one.what)]
        worst = max(some, key=lambda one: abs(one.error))
        table.append((what, str(len(some)), f"{mean_error(some):.1%}", f"{worst.error:+.1%}"))
    missed = [one for one in compared if abs(one.error) > WORST]
    return [
        *aligned(table), "", f"over {WORST:.0%}: {len(missed)} of {len(compared)}",
        *(f"  {m.case} by {m.what}: {m.estimated_us:.0f} us, {m.measured_us:.0f} measured ({m.error:+.1%})" for m in missed),
    ]  # fmt: skip


def mean_error(some: Iterable[Compared]) -> float:
    return statistics.mean(abs(one.error) for one in some)
