"""The domains that a benchmark compares: the group's own, and across nodes one for each other number of SMs that NCCL gets.

All of them have the same ranks. The number of SMs is a setting of a whole domain, so each domain has a process group of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from ...group.domain import OverlapDomain
from ...ops.plan_cache import cache_of
from ...select.choose import Choice, choose
from ...select.low_latency import serving
from ..measure.cases import Case
from ..measure.pretended import pretends
from ..measure.runs import Session
from .node_baselines import NodeGroups


@dataclass(frozen=True)
class Ours:
    """A method of ours as one domain runs it."""

    method: str
    domain: OverlapDomain
    choice: Choice


@dataclass(frozen=True)
class Domains:
    """The domains of a benchmark.

    own: the group's, in which NCCL has the SMs that the config names or the probe has found (symmetric/wire.py). others: those
    with other numbers of SMs. groups: for NCCL in two steps; None if that would be NCCL in one.
    """

    own: OverlapDomain
    others: tuple[OverlapDomain, ...]
    groups: NodeGroups | None

    @classmethod
    def of(cls, session: Session, received: Sequence[int], network_sms: Sequence[int]) -> Domains:
        """Make the domains, and print what the probe has found. Collective.

        received: how many bytes a rank receives of each shape. network_sms: the numbers of SMs to measure besides the own one.
        """
        own = session.domain(received)
        found = sms_of(own)
        others = tuple(_domain(session, received, sms) for sms in network_sms if sms != found)
        if found and own.device.type == "cuda":  # NVSHMEM takes none
            beside = f"; measured, too: {', '.join(str(sms_of(other)) for other in others)}" if others else ""
            session.world.say(f"NCCL has {found} SMs between nodes, by the probe{beside}")
        return cls(own, others, NodeGroups.of(own.topology, session.world.group))

    def ours(self, case: Case, session: Session) -> dict[str, Ours]:
        """The methods that serve a case, by the names of their times. NCCL alone is the same in every domain."""
        planned = case.planned(session.world.size, session.settings.dtype)
        found = {}
        for domain in (self.own, *self.others):
            table, suffix = cache_of(domain, case.name).table, "" if domain is self.own else f", {sms_of(domain)} SMs"
            for method in serving(session.settings.methods, planned):
                choice = choose(method, planned, domain.device, table, domain.topology.nodes)
                if domain is self.own or choice.method != "collective":
                    found[method + suffix] = Ours(method, domain, choice)
        return found

    def told(self, domain: OverlapDomain) -> dict[str, Any]:
        """What a row says about its domain. Nothing inside one node."""
        if self.own.topology.nodes == 1:
            return {}
        sums = domain.span.settled(domain.config).reduce_sms if domain.topology.local > 1 else 0
        sms = {"network_sms": sms_of(domain), "probe_sms": sms_of(self.own), "reduce_sms": sums}
        return sms | {"nodes": self.own.topology.nodes, "emulated": pretends()}


def sms_of(domain: OverlapDomain) -> int:
    """The SMs that the network of a domain may hold. Between CPU processes it is what was asked for, and has no meaning."""
    return domain.span.settled(domain.config).network_sms


def _domain(session: Session, received: Sequence[int], sms: int) -> OverlapDomain:
    """Another domain of the same ranks."""
    settings = replace(session.settings, config=replace(session.settings.config, network_sms=sms))
    world = replace(session.world, group=dist.new_group())
    return replace(session, settings=settings, world=world).domain(received)
