"""Every engine by the method of its plan, and the start of one.

In a group that spans nodes `chunked` and `fused` have two engines of each kind: between CPU processes, and between GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from ..planning.engine_plan import EnginePlan
from ..protocol.node_streams import NodeStreamEngine
from ..protocol.tags import Tag
from ..runtime.domain import OverlapDomain
from ..select.method import Method
from .all_gather_gemm import ChunkedGather, CollectiveGather, DirectGather, FusedGather, Gather, LowLatencyGather
from .all_to_all_gemm import (
    ChunkedAllToAllGemm,
    CollectiveAllToAllGemm,
    DirectAllToAllGemm,
    FusedAllToAllGemm,
    Receiver,
)
from .fused_node_processes import (
    FusedNodeAllToAllGemm,
    FusedNodeGather,
    FusedNodeGemmAllToAll,
    FusedNodeScatter,
)
from .fused_node_streams import (
    FusedNodeStreamAllToAllGemm,
    FusedNodeStreamGather,
    FusedNodeStreamGemmAllToAll,
    FusedNodeStreamScatter,
)
from .gemm_all_to_all import (
    ChunkedGemmAllToAll,
    CollectiveGemmAllToAll,
    DirectGemmAllToAll,
    Exchange,
    FusedGemmAllToAll,
)
from .gemm_reduce_scatter import (
    ChunkedScatter,
    CollectiveScatter,
    DirectScatter,
    FusedScatter,
    LowLatencyScatter,
    Scatter,
)
from .node_exchanges import NodeStreamAllToAllGemm, NodeStreamGemmAllToAll
from .node_processes import NodeAllToAllGemm, NodeGather, NodeGemmAllToAll, NodeScatter
from .node_streams import NodeStreamGather, NodeStreamScatter
from .pulled_all_to_all import PulledChunkedGemmAllToAll, PulledFusedGemmAllToAll

_NONE_SPARED: AbstractContextManager[None] = nullcontext()

PROCESSES, GPUS = "nodes of CPU processes", "nodes of GPUs"

GATHERS: dict[str, Callable[[OverlapDomain, EnginePlan, Tag, torch.Tensor], Gather]] = {
    "collective": CollectiveGather,
    "chunked": ChunkedGather,
    "fused": FusedGather,
    "direct": DirectGather,
    "low_latency": LowLatencyGather,
    f"chunked, {PROCESSES}": NodeGather,
    f"chunked, {GPUS}": NodeStreamGather,
    f"fused, {PROCESSES}": FusedNodeGather,
    f"fused, {GPUS}": FusedNodeStreamGather,
}
SCATTERS: dict[str, Callable[[OverlapDomain, EnginePlan, Tag, torch.Tensor, torch.Tensor], Scatter]] = {
    "collective": CollectiveScatter,
    "chunked": ChunkedScatter,
    "fused": FusedScatter,
    "direct": DirectScatter,
    "low_latency": LowLatencyScatter,
    f"chunked, {PROCESSES}": NodeScatter,
    f"chunked, {GPUS}": NodeStreamScatter,
    f"fused, {PROCESSES}": FusedNodeScatter,
    f"fused, {GPUS}": FusedNodeStreamScatter,
}
GEMM_ALL_TO_ALLS: dict[
    str, Callable[[OverlapDomain, EnginePlan, Tag, torch.Tensor, torch.Tensor, torch.Tensor | None], Exchange]
] = {
    "collective": CollectiveGemmAllToAll,
    "chunked": ChunkedGemmAllToAll,
    "fused": FusedGemmAllToAll,
    "direct": DirectGemmAllToAll,
    f"chunked, {PROCESSES}": NodeGemmAllToAll,
    f"chunked, {GPUS}": NodeStreamGemmAllToAll,
    f"fused, {PROCESSES}": FusedNodeGemmAllToAll,
    f"fused, {GPUS}": FusedNodeStreamGemmAllToAll,
}
PULLED_GEMM_ALL_TO_ALLS: dict[
    str, Callable[[OverlapDomain, EnginePlan, Tag, torch.Tensor, torch.Tensor, torch.Tensor], Exchange]
] = {"chunked": PulledChunkedGemmAllToAll, "fused": PulledFusedGemmAllToAll}
ALL_TO_ALL_GEMMS: dict[str, Callable[[OverlapDomain, EnginePlan, Tag, torch.Tensor], Receiver]] = {
    "collective": CollectiveAllToAllGemm,
    "chunked": ChunkedAllToAllGemm,
    "fused": FusedAllToAllGemm,
    "direct": DirectAllToAllGemm,
    f"chunked, {PROCESSES}": NodeAllToAllGemm,
    f"chunked, {GPUS}": NodeStreamAllToAllGemm,
    f"fused, {PROCESSES}": FusedNodeAllToAllGemm,
    f"fused, {GPUS}": FusedNodeStreamAllToAllGemm,
}


def start_gather(domain: OverlapDomain, plan: EnginePlan, tag: Tag, x_shard_m: torch.Tensor) -> Gather:
    """A started engine that gathers x_shard_m [M/W, K]."""
    engine = GATHERS[plan.method if plan.nodes == 1 else _across_nodes(domain, plan)]
    gather = engine(domain, plan, tag, x_shard_m.contiguous())
    gather.start()
    return gather


def start_scatter(domain: OverlapDomain, plan: EnginePlan, tag: Tag, a_mk: torch.Tensor, b_kn: torch.Tensor) -> Scatter:
    """A started engine that multiplies and reduces."""
    engine = SCATTERS[plan.method if plan.nodes == 1 else _across_nodes(domain, plan)]
    scatter = engine(domain, plan, tag, a_mk, b_kn)
    scatter.start()
    return scatter


def start_gemm_all_to_all(
    domain: OverlapDomain, plan: EnginePlan, tag: Tag, a_shard_m: torch.Tensor, b_kn: torch.Tensor,
    into: torch.Tensor | None = None,
) -> Exchange:  # fmt: skip
    """A started engine that multiplies and exchanges.

    into: [W, M/W, N/W], each block contiguous, where the result belongs. The GEMM writes the own block there, which leaves the
    peers' to be copied out of the slot. None: all stay in the slot, for who reads them there.
    """
    engine = GEMM_ALL_TO_ALLS[plan.method if plan.nodes == 1 else _across_nodes(domain, plan)]
    exchange = engine(domain, plan, tag, a_shard_m, b_kn, into)
    exchange.start()
    return exchange


def start_pulled_gemm_all_to_all(
    domain: OverlapDomain, plan: EnginePlan, tag: Tag, a_shard_m: torch.Tensor, b_kn: torch.Tensor, into: torch.Tensor
) -> Exchange:
    """A started engine that multiplies and exchanges, whose blocks the ranks pull (plan.may_pull). `into` [W, M/W, N/W] is
    complete when the operator ends."""
    exchange = PULLED_GEMM_ALL_TO_ALLS[plan.method](domain, plan, tag, a_shard_m, b_kn, into)
    exchange.start()
    return exchange


def start_all_to_all_gemm(domain: OverlapDomain, plan: EnginePlan, tag: Tag, sent: torch.Tensor) -> Receiver:
    """A started engine that exchanges sent [W, M/W, K/W]: block d goes to rank d. Each block is contiguous."""
    engine = ALL_TO_ALL_GEMMS[plan.method if plan.nodes == 1 else _across_nodes(domain, plan)]
    receiver = engine(domain, plan, tag, sent)
    receiver.start()
    return receiver


def products_beside(domain: OverlapDomain, started: EnginePlan | None) -> AbstractContextManager[None]:
    """Bracket of library products that leave SMs to what an engine of the plan `started` sends and adds meanwhile; None: nothing
    is under way. Engines bracket their own products."""
    if started is None or started.nodes == 1 or not started.slots or not started.spared_sms:
        return _NONE_SPARED
    assert isinstance(domain.engine, NodeStreamEngine)
    return domain.engine.products(started.spared_sms)


def _across_nodes(domain: OverlapDomain, plan: EnginePlan) -> str:
    """The key of the engine by which a plan runs across nodes."""
    if plan.method == "collective":
        return plan.method
    assert Method(plan.method).crosses, f"{plan.method} stays inside one node (planning/refusals.py)"
    return f"{plan.method}, {GPUS if isinstance(domain.engine, NodeStreamEngine) else PROCESSES}"
