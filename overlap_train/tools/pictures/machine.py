"""What pictures say of the machine: its GPUs in a title, and the nodes that they were."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..measure.results import Row, ranks_of

EMULATED = ", emulated on one machine: between them NCCL goes over loopback sockets"
Record = dict[str, Any]  # a JSON file: its rows, and on what they were measured


def gpus_of(found: Mapping[str, Any], world: int) -> str:
    """`4 x H100`, by what results.hardware() has found; `2 CPU processes`, and `4 GPUs` of which no name is known."""
    device = found.get("device")
    return f"{world} x {_model(device)}" if device not in (None, "cpu") else ranks_of(found, world)


def _model(device: str) -> str:
    """`H100` of "NVIDIA H100 80GB HBM3", `A100` of "NVIDIA A100-SXM4-80GB": the first word with a digit."""
    return next((word for word in re.findall(r"\w+", device) if re.search(r"\d", word)), device)


def machine_of(record: Record) -> str:
    """The GPUs of a record, and as how many nodes they were measured where these are several."""
    row = record["rows"][0]
    nodes = nodes_of(row)
    return gpus_of(record.get("hardware", {}), row["world"]) + (f" as {nodes} nodes" if nodes > 1 else "")


def about_nodes(record: Record) -> tuple[str, ...]:
    """The line of a header that says what the nodes were; none where there is one."""
    row: Row = record["rows"][0]
    nodes = nodes_of(row)
    if nodes == 1:
        return ()
    each = row["world"] // nodes
    ranks = ranks_of(record.get("hardware", {}), each)
    how = EMULATED if row.get("emulated", True) else ""
    return (f"{nodes} nodes of {ranks if each > 1 else 'one rank'}{how}.",)


def nodes_of(row: Row) -> int:
    """How many nodes the ranks of an operator's row were. Older rows do not say it; if they name SMs of a network, two emulated
    ones."""
    return row.get("nodes", 2 if "network_sms" in row else 1)
