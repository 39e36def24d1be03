"""The table of operators: by how a group's ranks reach each other, by operator and method the class that runs a pass.

nodes/ adds its own for groups that span nodes.
"""

from __future__ import annotations

from typing import Any

import torch

from ..group.domain import OverlapDomain
from ..group.signals import Tag
from ..schedule.kinds import Kind
from .a2a_gemm import AllToAllGemm, ChunkedAllToAllGemm, CollectiveAllToAllGemm, DirectAllToAllGemm, FusedAllToAllGemm
from .ag_gemm import (
    AllGatherGemm,
    ChunkedAllGatherGemm,
    CollectiveAllGatherGemm,
    DirectAllGatherGemm,
    FusedAllGatherGemm,
    LowLatencyAllGatherGemm,
)
from .gemm_a2a import (
    ChunkedGemmAllToAll,
    CollectiveGemmAllToAll,
    DirectGemmAllToAll,
    FusedGemmAllToAll,
    GemmAllToAll,
    PulledChunkedGemmAllToAll,
    PulledFusedGemmAllToAll,
)
from .gemm_rs import (
    ChunkedGemmReduceScatter,
    CollectiveGemmReduceScatter,
    DirectGemmReduceScatter,
    FusedGemmReduceScatter,
    GemmReduceScatter,
    LowLatencyGemmReduceScatter,
)
from .plan import EnginePlan

Engines = dict[Kind, dict[str, Any]]  # by operator and method

IN_NODE: Engines = {
    Kind.AG_GEMM: {
        "collective": CollectiveAllGatherGemm,
        "chunked": ChunkedAllGatherGemm,
        "fused": FusedAllGatherGemm,
        "direct": DirectAllGatherGemm,
        "low_latency": LowLatencyAllGatherGemm,
    },
    Kind.GEMM_RS: {
        "collective": CollectiveGemmReduceScatter,
        "chunked": ChunkedGemmReduceScatter,
        "fused": FusedGemmReduceScatter,
        "direct": DirectGemmReduceScatter,
        "low_latency": LowLatencyGemmReduceScatter,
    },
    Kind.GEMM_A2A: {
        "collective": CollectiveGemmAllToAll,
        "chunked": ChunkedGemmAllToAll,
        "fused": FusedGemmAllToAll,
        "direct": DirectGemmAllToAll,
    },
    Kind.A2A_GEMM: {
        "collective": CollectiveAllToAllGemm,
        "chunked": ChunkedAllToAllGemm,
        "fused": FusedAllToAllGemm,
        "direct": DirectAllToAllGemm,
    },
}
PULLED = {"chunked": PulledChunkedGemmAllToAll, "fused": PulledFusedGemmAllToAll}
TABLE: dict[str, Engines] = {"node": IN_NODE}  # by `OneNode.reach`


def register(reach: str, engines: Engines) -> None:
    """Add the engines of groups whose ranks reach each other in another way. `collective` is the same for all."""
    TABLE[reach] = {kind: {"collective": IN_NODE[kind]["collective"], **methods} for kind, methods in engines.items()}


def start_ag_gemm(domain: OverlapDomain, plan: EnginePlan, tag: Tag, x_shard_m: torch.Tensor) -> AllGatherGemm:
    """A started engine that gathers x_shard_m [M/W, K]."""
    return TABLE[domain.span.reach][plan.kind][plan.method](domain, plan, tag, x_shard_m.contiguous())


def start_gemm_rs(
    domain: OverlapDomain, plan: EnginePlan, tag: Tag, a_mk: torch.Tensor, b_kn: torch.Tensor
) -> GemmReduceScatter:
    """A started engine that multiplies and reduces."""
    return TABLE[domain.span.reach][plan.kind][plan.method](domain, plan, tag, a_mk, b_kn)


def start_gemm_a2a(
    domain: OverlapDomain, plan: EnginePlan, tag: Tag, a_shard_m: torch.Tensor, b_kn: torch.Tensor,
    into: torch.Tensor | None = None,
) -> GemmAllToAll:  # fmt: skip
    """A started engine that multiplies and exchanges.

    into: [W, M/W, N/W], each block contiguous, where the result belongs. The GEMM writes the own block there, which leaves the
    peers' to be copied out of the slot. None: all stay in the slot, for who reads them there.
    """
    return TABLE[domain.span.reach][plan.kind][plan.method](domain, plan, tag, a_shard_m, b_kn, into)


def start_pulled_gemm_a2a(
    domain: OverlapDomain, plan: EnginePlan, tag: Tag, a_shard_m: torch.Tensor, b_kn: torch.Tensor, into: torch.Tensor
) -> GemmAllToAll:
    """A started engine that multiplies and exchanges, whose blocks the ranks pull (plan.may_pull). `into` [W, M/W, N/W] is
    complete when the operator ends."""
    return PULLED[plan.method](domain, plan, tag, a_shard_m, b_kn, into)


def start_a2a_gemm(domain: OverlapDomain, plan: EnginePlan, tag: Tag, sent: torch.Tensor) -> AllToAllGemm:
    """A started engine that exchanges sent [W, M/W, K/W]: block d goes to rank d. Each block is contiguous."""
    return TABLE[domain.span.reach][plan.kind][plan.method](domain, plan, tag, sent)
