"""`overlap-train plan --check`: the estimate of every recorded row beside what was measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...select.choose import alone, choose
from ...select.cost import Estimate, library_us, reach_of
from ...select.method import Pass
from ...select.system import System, system_of
from ...select.table import UNTUNED
from ..measure.cases import LAYERS, PASSES, Case
from .prediction import COLLECTIVE, run_us

Row = dict[str, Any]
WORST, MEAN = 0.25, 0.12  # what is aimed at: of one figure, in the mean


@dataclass(frozen=True)
class Compared:
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
        ValueError: there is neither, or they cannot be read, or the GPU is not known.
    """
    found: list[Compared] = []
    for path, of_rows in ((folder / "operators.json", _operators), (folder / "layers.json", _layers)):
        if path.exists():
            try:
                record = json.loads(path.read_text())
                rows, device = list(record["rows"]), str(record.get("hardware", {}).get("device"))
            except (OSError, ValueError, KeyError, TypeError) as failure:
                raise ValueError(f"{path} is no record ({failure}); name a folder that bench wrote") from failure
            on = system or system_of(device)
            if on is None:
                raise ValueError(f"--check {folder}: recorded on {device!r}, which is not known; add --system")
            found += [replace(one, case=f"{folder.name} {one.case}") for one in of_rows(rows, on)]
    if not found:
        raise ValueError(
            f"--check {folder}: no row of operators.json or layers.json there can be estimated; name a folder that bench wrote"
        )
    return found


def _operators(rows: list[Row], system: System) -> list[Compared]:
    """Rows of `bench operators`, and of `bench hierarchical` with the network of the record. Each half of the work once a
    shape."""
    found, seen = [], set()
    crosses = "network_sms" in rows[0]
    nodes = rows[0].get("nodes", 1 + crosses)
    if crosses:
        system = replace(system, nic_gbs=max(_network_gbs(row, nodes) for row in rows))
    for row in rows:
        case, p = f"{row['op']} {row['pass']} {row['m']}, {row['n']}, {row['k']}", _pass_of(row)
        us = {row["method"]: (_by(row["method"], p, system, nodes).us, row["ms"])}
        if case not in seen and not crosses:
            seen.add(case)
            us |= {
                "gemm": (library_us(system, p.rows, p.n, p.k), row["gemm_ms"]),
                "comm": (reach_of(nodes).collective_us(p, system), row["comm_ms"]),
                "sequence": (_by(COLLECTIVE, p, system, nodes).device_us, row["sequence_ms"]),
            }
        found += [Compared(case, what, planned, 1e3 * ms) for what, (planned, ms) in us.items()]
    return found


def _pass_of(row: Row) -> Pass:
    """What one rank multiplied."""
    case = Case("", row["op"], row["pass"], row["m"], row["n"], row["k"])
    return case.planned(row["world"], getattr(torch, row["dtype"]))


def _network_gbs(row: Row, nodes: int) -> float:
    """What NCCL alone carried between nodes. With several ranks in a node its rings cross once for all of them."""
    p = _pass_of(row)
    far = p.world - p.world // nodes if p.kind.exchanges else (p.world - 1) / (p.world // nodes)
    return p.m // p.world * far * p.row_features * p.dtype.itemsize / row["comm_ms"] / 1e6


def _by(method: str, p: Pass, system: System, nodes: int) -> Estimate:
    """An operator with nothing after it."""
    choice = choose(method, p, system, UNTUNED, nodes)
    return reach_of(nodes).estimate(p, alone(choice, p, system).how, system)


def _layers(rows: list[Row], system: System) -> list[Compared]:
    """Forward and backward of two linears. Attention blocks of Ulysses, which have a core attention, are not estimated."""
    found, seen = [], set()
    for row in (row for row in rows if row["layer"] in LAYERS):
        case, method = f"{row['layer']} s={row['seq']}", row["method"].removesuffix("_graph")
        us = _layer_us(row, method, system, is_graph=method != row["method"])
        found.append(Compared(case, row["method"], us, 1e3 * row["ms"]))
        if case not in seen:
            seen.add(case)
            us = _layer_us(row, COLLECTIVE, system, is_graph=True)
            found.append(Compared(case, "megatron", us, 1e3 * row["megatron_ms"]))
    return found


def _layer_us(row: Row, method: str, system: System, is_graph: bool) -> float:
    """Microseconds of a layer's forward and backward. is_graph: the host takes no part."""
    (column, scattered), parts = LAYERS[row["layer"]], []
    for op, (n, k) in (("ag_gemm", column), ("gemm_rs", scattered)):
        for pass_ in PASSES:
            p = Case("", op, pass_, row["seq"], n, k).planned(row["world"], torch.bfloat16)
            how = choose(method, p, system, UNTUNED).how
            parts.append(reach_of(1).estimate(p, how, system, backward=pass_ == "dgrad"))
    return sum(part.device_us for part in parts) if is_graph else run_us(parts)


def report(compared: Sequence[Compared]) -> list[str]:
    """What the command prints: errors by what was measured, then rows that miss."""
    lines = ["what                 figures   mean error     worst"]
    whats = dict.fromkeys(one.what for one in compared)
    groups = {what: [one for one in compared if one.what == what] for what in whats} | {"all": list(compared)}
    for what, some in groups.items():
        worst = max(some, key=lambda one: abs(one.error))
        lines.append(f"{what:<20} {len(some):>7}   {mean_error(some):>10.1%}   {worst.error:>+7.1%}")
    missed = [one for one in compared if abs(one.error) > WORST]
    lines += ["", f"over {WORST:.0%}: {len(missed)} of {len(compared)}"]
    return lines + [
        f"  {one.case} by {one.what}: {one.estimated_us:.0f} us estimated, {one.measured_us:.0f} measured ({one.error:+.1%})"
        for one in missed
    ]


def mean_error(some: Iterable[Compared]) -> float:
    return statistics.mean(abs(one.error) for one in some)
