"""The table of operators: by how a group's ranks reach each other, by operator and method the class that runs a pass.

nodes/ adds its own for groups that span nodes.
"""

from __future__ import annotations

from typing import Any

from ..schedule.kinds import Kind
from . import a2a_gemm, ag_gemm, dispatch_gemm, gemm_a2a, gemm_combine, gemm_rs

Engines = dict[Kind, dict[str, Any]]  # by operator and method

IN_NODE: Engines = {
    Kind.AG_GEMM: ag_gemm.METHODS,
    Kind.GEMM_RS: gemm_rs.METHODS,
    Kind.GEMM_A2A: gemm_a2a.METHODS,
    Kind.A2A_GEMM: a2a_gemm.METHODS,
    Kind.DISPATCH_GEMM: dispatch_gemm.METHODS,
    Kind.GEMM_COMBINE: gemm_combine.METHODS,
}
TABLE: dict[str, Engines] = {"node": IN_NODE}  # by EnginePlan.reach


def register(reach: str, engines: Engines) -> None:
    """Add the engines of groups whose ranks reach each other in another way. `collective` is the same for all."""
    TABLE[reach] = {kind: {"collective": IN_NODE[kind]["collective"], **methods} for kind, methods in engines.items()}
