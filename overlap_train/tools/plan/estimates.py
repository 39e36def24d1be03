"""One pass by one method: its plan, what runs by it, and what that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...config import OverlapConfig
from ...methods import TRAITS
from ...ops.plan import planner_of
from ...planning.choice import alone, choose
from ...planning.cost import communication_sms
from ...planning.machines import System
from ...planning.table import Table
from ...schedule.order import Topology
from ...select.passes import Pass
from ...select.tiling import Target
from .simulation.simulate import simulate
from .simulation.timeline import Program, Timeline
from .simulation.work import AttentionSide, Work

METHODS = tuple(method for method, traits in TRAITS.items() if not traits.few_rows)  # plans are for long sequences
COLLECTIVE = "collective"
BY_LIBRARY = ("chunked", COLLECTIVE)  # no tile is simulated
RANK = 0  # whose part is shown: all do the same


@dataclass(frozen=True)
class Estimate:
    """One pass by one method. device_us: what the GPU needs; host_us: until the call has returned. variant: how it runs."""

    method: str
    variant: str
    device_us: float
    host_us: float
    timeline: Timeline

    @property
    def us(self) -> float:
        """Microseconds of a call where calls follow each other, as the benchmark measures them."""
        return max(self.device_us, self.host_us)


def methods_of(nodes: int, methods: Sequence[str] = METHODS) -> tuple[str, ...]:
    """Those of `methods` with engines for a group that spans so many nodes (planning/refusals.py: why_not_across_nodes)."""
    return tuple(method for method in methods if nodes == 1 or TRAITS[method].crosses)


def work_of(
    system: System, pass_: Pass, method: str, table: Table, is_alone: bool = False, nodes: int = 1,
    side: AttentionSide | None = None,
) -> Work:  # fmt: skip
    """A pass as `auto` or a method would run it on that machine, by its plan. is_alone: without the wgrad that splits it. nodes:
    that its group spans. side: of a projection of Ulysses."""
    target, topology = Target(system.capability), Topology(nodes, pass_.world // nodes, RANK)
    choice = choose(method, pass_, target, table, nodes)  # type: ignore[arg-type]  # a GPU that need not be here
    if is_alone:
        choice = alone(choice, pass_, target)  # type: ignore[arg-type]
    weight = torch.empty(pass_.n, pass_.k, dtype=pass_.dtype, device="meta")
    sms, sums = communication_sms(system, topology.local)
    planner = planner_of(topology, OverlapConfig(network_sms=sms, reduce_sms=sums), system.nic_gbs)
    plan = planner.plan(choice, pass_, target, weight)  # type: ignore[arg-type]
    return Work(system, plan, pass_, topology, side=side)


def estimate(work: Work, what: Program, asked: str = "") -> Estimate:
    """asked: the method that was asked for; "": the plan's."""
    plan = work.plan
    return simulated(work.system, what, asked or plan.method, plan.variant.named(plan.method))


def simulated(system: System, what: Program, method: str, variant: str) -> Estimate:
    timeline = simulate([what], system.copy_gbs, system.nic_gbs)
    return Estimate(method, variant, timeline.us, what.host_us, timeline)
