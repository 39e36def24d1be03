"""The table of operators: by how a group's ranks reach each other, by operator and method the class that runs a pass.

nodes/ adds its own for groups that span nodes.
"""

from __future__ import annotations

from typing import Any

import torch

from ..group.domain import OverlapDomain
from ..group.signals import Tag
from ..schedule.kinds import Kind
from . import a2a_gemm, ag_gemm, gemm_a2a, gemm_rs
from .gemm_a2a import PULLED, GemmAllToAll
from .plan import EnginePlan

Engines = dict[Kind, dict[str, Any]]  # by operator and method

IN_NODE: Engines = {
    Kind.AG_GEMM: ag_gemm.METHODS,
    Kind.GEMM_RS: gemm_rs.METHODS,
    Kind.GEMM_A2A: gemm_a2a.METHODS,
    Kind.A2A_GEMM: a2a_gemm.METHODS,
}
TABLE: dict[str, Engines] = {"node": IN_NODE}  # by `OneNode.reach`


def register(reach: str, engines: Engines) -> None:
    """Add the engines of groups whose ranks reach each other in another way. `collective` is the same for all."""
    TABLE[reach] = {kind: {"collective": IN_NODE[kind]["collective"], **methods} for kind, methods in engines.items()}


def start_engine(domain: OverlapDomain, plan: EnginePlan, tag: Tag, *operands: torch.Tensor | None) -> Any:
    """A started engine of a pass: AllGatherGemm of x_shard_m, GemmReduceScatter of a_mk and b_kn, GemmAllToAll of a_shard_m, b_kn
    and perhaps `into`, or AllToAllGemm of the blocks to send, [W, M/W, K/W], each contiguous."""
    return TABLE[domain.span.reach][plan.kind][plan.method](domain, plan, tag, *operands)


def start_pulled_gemm_a2a(
    domain: OverlapDomain, plan: EnginePlan, tag: Tag, a_shard_m: torch.Tensor, b_kn: torch.Tensor, into: torch.Tensor
) -> GemmAllToAll:
    """A started engine that multiplies and exchanges, whose blocks the ranks pull (plan.may_pull). `into` [W, M/W, N/W] is
    complete when the operator ends."""
    return PULLED[plan.method](domain, plan, tag, a_shard_m, b_kn, into)
