"""`overlap-train plan --check` for a record of several nodes: what calls took, and for how long they kept the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...planning.machines import System
from ...planning.schedule.kinds import EXCHANGES
from ...planning.table import UNTUNED
from ..pictures.machine import nodes_of
from .compared import HOST, Compared
from .estimates import COLLECTIVE, estimate, work_of
from .records import Row, connections_of, pass_of
from .simulation.programs import program


def compare_nodes(folder: Path, rows: list[Row], system: System) -> list[Compared]:
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
