"""The plan of a call by what is known of the network, where it sends between nodes of GPUs."""

from __future__ import annotations

import torch

from ..config import OverlapConfig
from ..planning.plan import Plan, make_plan
from ..planning.spec import OperatorSpec
from ..runtime.domain import OverlapDomain
from ..select.table import Table


def settled_plan(
    domain: OverlapDomain, spec: OperatorSpec, config: OverlapConfig, known: Table, x: torch.Tensor, w: torch.Tensor
) -> Plan:
    """The plan of `spec` for operands like x and w. The first one that sends between nodes connects them, which is collective,
    and measures their network: products leave it the SMs that it needs, and blocks are cut as its pace wants it."""
    plan = make_plan(spec, config, known, domain.topology, x, w)
    if not any(engine.nodes > 1 and engine.slots for engine in (plan.fprop, plan.dgrad)):
        return plan
    config = domain.settled(config)
    return make_plan(spec, config, known, domain.topology, x, w, network_gbs=domain.network_gbs)
