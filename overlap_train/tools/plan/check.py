"""`overlap-train plan --check`: the prediction of every recorded row beside what was measured.

Of several nodes also for how long calls kept the host.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...planning.machines import System
from ...planning.table import UNTUNED, Table
from ...schedule.order import EXCHANGES
from ..measure.shapes import LAYERS
from ..pictures.machine import nodes_of
from .estimates import COLLECTIVE, Estimate, estimate, work_of
from .inputs import Linear
from .prediction import forward_pass
from .records import Row, connections_of, holds_layers_alone, pass_of, rows_of, tuned
from .simulation.backward import backward
from .simulation.programs import program

# The weights whose records the H200's figures were fitted to (machines.py). All others are held out.
CALIBRATED = ({14336, 4096}, {53248, 16384})
WORST, MEAN = 0.10, 0.05  # what is aimed at
HOST = "host"  # until the call returned
WHAT = ("gemm", "comm", "sequence", HOST)  # columns of rows besides the method's


@dataclass(frozen=True)
class Compared:
    """One figure of a record, predicted and measured. what: a method, or one of WHAT. is_fitted: it is among those that the
    figures were fitted to."""

    record: str
    case: str
    what: str
    predicted_us: float
    measured_us: float
    is_fitted: bool = False

    @property
    def error(self) -> float:
        """+0.1: the prediction is 10 % too long."""
        return self.predicted_us / self.measured_us - 1

    @property
    def is_method(self) -> bool:
        return self.what not in WHAT


def compare(folder: Path, system: System) -> list[Compared]:
    """Every row of the folder's operators.json; none where it holds layers alone."""
    if holds_layers_alone(folder):
        return []
    rows = rows_of(folder, "operators.json")
    return (_in_one_node if nodes_of(rows[0]) == 1 else _across_nodes)(folder, rows, system)


def _in_one_node(folder: Path, rows: list[Row], system: System) -> list[Compared]:
    """Each half of the work once a shape."""
    table, found, seen = tuned(folder, rows[0]["world"]), [], set()
    for row in rows:
        case = f"{row['op']} {row['pass']} {row['m']}, {row['n']}, {row['k']}"
        fitted = {row["n"], row["k"]} in CALIBRATED
        work = work_of(system, pass_of(row), row["method"], table, is_alone=True)
        predicted = {row["method"]: (estimate(work, program(work)).us, row["ms"])}
        if case not in seen:
            seen.add(case)
            alone = work_of(system, pass_of(row), COLLECTIVE, table)
            predicted |= {
                "gemm": (alone.gemm_us, row["gemm_ms"]),
                "comm": (alone.collective_us, row["comm_ms"]),
                "sequence": (estimate(alone, program(alone)).device_us, row["sequence_ms"]),
            }
        found += [Compared(folder.name, case, what, us, 1e3 * ms, fitted) for what, (us, ms) in predicted.items()]
    return found


def _across_nodes(folder: Path, rows: list[Row], system: System) -> list[Compared]:
    """Every row by a method that overlaps, with the network and the hardware queues of the record.

    Raises:
        ValueError: no row tells how fast the network was.
    """
    system = replace(
        system, nic_gbs=_network_gbs(folder, rows), connections=connections_of(folder) or system.connections
    )
    found: list[Compared] = []
    for row in rows:
        if row["method"] == COLLECTIVE:
            continue
        case = f"{row['op']} {row['pass']} {row['m']}, {row['n']}, {row['k']}"
        work = work_of(system, pass_of(row), row["method"], UNTUNED, nodes=nodes_of(row))
        planned = estimate(work, program(work))
        found += [
            Compared(folder.name, case, row["method"], planned.us, 1e3 * row["ms"]),
            Compared(folder.name, case, HOST, planned.host_us, row["host_us"]),
        ]
    return found


def _network_gbs(folder: Path, rows: list[Row]) -> float:
    """What NCCL alone carried in the fastest row. With several ranks in a node its rings cross once for all of them, so that only
    all-to-alls tell what one NIC does."""
    telling = [row for row in rows if pass_of(row).kind in EXCHANGES or nodes_of(row) == row["world"]]
    if not telling:
        raise ValueError(
            f"--check {folder}: its rows are of several nodes (bench hierarchical), and none of an all-to-all tells how fast the "
            f"network between them was; record gemm_a2a, too, or name folders of one node"
        )
    return max(map(_gbs, telling))


def _gbs(row: Row) -> float:
    pass_, far = pass_of(row), row["world"] - row["world"] // nodes_of(row)
    return pass_.m // row["world"] * far * pass_.row_features * pass_.dtype.itemsize / row["comm_ms"] / 1e6


def compare_layers(folder: Path, system: System) -> list[Compared]:
    """Rows of the folder's layers.json, if there is one: forward and backward of two linears. None is fitted. Attention blocks of
    Ulysses, which have a core attention, are not planned."""
    if not (folder / "layers.json").exists():
        return []
    rows = [row for row in rows_of(folder, "layers.json") if row["layer"] in LAYERS]
    found, seen = [], set()
    table = tuned(folder, rows[0]["world"]) if rows else UNTUNED
    for row in rows:
        name = f"{row['layer']} s={row['seq']}"
        is_graph = row["method"].endswith("_graph")
        us = _layer_us(system, row, row["method"].removesuffix("_graph"), table, is_graph)
        found.append(Compared(folder.name, name, row["method"], us, 1e3 * row["ms"]))
        if name not in seen:
            seen.add(name)
            us = _layer_us(system, row, COLLECTIVE, table, is_graph=True)
            found.append(Compared(folder.name, name, "megatron", us, 1e3 * row["megatron_ms"]))
    return found


def _layer_us(system: System, row: Row, method: str, table: Table, is_graph: bool) -> float:
    """Predicted microseconds of a layer's forward and backward. is_graph: the host takes no part."""
    layer, world = LAYERS[row["layer"]], row["world"]
    linears = (Linear("column", layer.column_n, layer.column_k, True), Linear("row", layer.row_n, layer.row_k, False))
    parts: list[Estimate] = []
    for linear in linears:
        first = forward_pass(linear, row["seq"], world)
        there, back = (work_of(system, pass_, method, table) for pass_ in (first, first.dgrad))
        parts += [estimate(there, program(there)), estimate(back, backward(back))]
    device = sum(part.device_us for part in parts)
    return device if is_graph else max(device, sum(part.host_us for part in parts))


def report(operators: Sequence[Compared], layers: Sequence[Compared]) -> list[str]:
    """What the command prints: errors by what was measured, then rows that miss."""
    lines = ["what                       figures   mean error   worst   over 10 %"]
    methods = [one for one in operators if one.is_method]
    groups: dict[str, list[Compared]] = {
        **_by_kind(operators),
        "methods, all": methods,
        "methods, fitted shapes": [one for one in methods if one.is_fitted],
        "methods, held out": [one for one in methods if not one.is_fitted],
        **{f"layer {what}": some for what, some in _by_kind(layers).items()},
        "layers, all (held out)": list(layers),
    }
    lines += [_line(name, some) for name, some in groups.items() if some]
    listed = [one for one in (*operators, *layers) if one.what != HOST]  # hosts differ too much for a list
    missed = [one for one in listed if abs(one.error) > WORST]
    lines += ["", f"over 10 %: {len(missed)} of {len(listed)}"]
    return [*lines, *(_missed(one) for one in missed)]


def mean_error(some: Iterable[Compared]) -> float:
    """Raises ValueError where there is nothing."""
    errors = [abs(one.error) for one in some]
    if not errors:
        raise ValueError(
            "--check: the records hold no row that is planned (attention blocks are not); name another one"
        )
    return statistics.mean(errors)


def _by_kind(some: Sequence[Compared]) -> dict[str, list[Compared]]:
    found: dict[str, list[Compared]] = {}
    for one in some:
        found.setdefault(one.what, []).append(one)
    return found


def _line(name: str, some: list[Compared]) -> str:
    worst = max(some, key=lambda one: abs(one.error))
    over = sum(abs(one.error) > WORST for one in some)
    return f"{name:<25} {len(some):>8}   {mean_error(some):>8.1%}   {worst.error:>+7.1%}   {over:>9}"


def _missed(one: Compared) -> str:
    figures = f"{one.predicted_us:.0f} us predicted, {one.measured_us:.0f} measured"
    return f"  {one.record} {one.case} by {one.what}: {figures} ({one.error:+.1%})"
