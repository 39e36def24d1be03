"""What each pass of each linear takes by each method, and what to choose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ...methods import TRAITS
from ...planning.backward import backward, communication_us, wgrad_us
from ...planning.choice import alone, choose
from ...planning.cost import network_sms, reduce_sms
from ...planning.machines import System
from ...planning.passes import Pass
from ...planning.plan import NodeSms, engine_plan
from ...planning.programs import program
from ...planning.schedule import A2A_GEMM, GATHER, GEMM_A2A, SCATTER, Topology
from ...planning.simulate import simulate
from ...planning.table import SAME, UNTUNED, Table
from ...planning.tiling import HOPPER_TILE, Target
from ...planning.timeline import Program, Timeline
from ...planning.work import Work
from ..measure.models import Model
from .fits import check
from .inputs import EXCHANGED, OUTPUT, Linear, Strategy, linears_of

METHODS = tuple(method for method, traits in TRAITS.items() if not traits.few_rows)  # plans are for long sequences
COLLECTIVE = "collective"
BY_LIBRARY = ("chunked", COLLECTIVE)  # no tile is simulated
FORWARD, BACKWARD = "forward", "backward"
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


@dataclass(frozen=True)
class Prediction:
    """One pass of one linear. m, n, k: of one rank's product. gemm_us, nccl_us: each half of the work alone."""

    linear: str
    direction: str
    m: int
    n: int
    k: int
    gemm_us: float
    nccl_us: float
    by_method: Mapping[str, Estimate]

    @property
    def bound_us(self) -> float:
        """Perfect overlap of cuBLAS and NCCL, as the benchmarks define it."""
        return max(self.gemm_us, self.nccl_us)

    @property
    def chosen(self) -> Estimate:
        """The fastest. What differs by no more than two measurements of one thing is a tie: NCCL's, else the first one's."""
        fastest, without = min(e.us for e in self.by_method.values()), self.by_method[COLLECTIVE]
        if fastest > (1 - SAME) * without.us:
            return without
        return next(e for e in self.by_method.values() if e.us <= (1 + SAME) * fastest)

    @property
    def exposed_us(self) -> float:
        """What communication adds to the products."""
        return max(0.0, self.chosen.us - self.gemm_us)


@dataclass(frozen=True)
class Sum:
    """The sum of several passes, in microseconds. host_us counts only where it is longer than the GPU's work."""

    gemm_us: float
    nccl_us: float
    without_us: float
    ours_us: float


def predict(
    system: System, strategy: Strategy, model: Model, methods: tuple[str, ...] = METHODS
) -> list[Prediction]:  # fmt: skip
    """Forward and backward of all linears by those of `methods` that serve them. Raises ValueError for what cannot be planned."""
    check(system, strategy, model)
    linears, ways = linears_of(model, strategy.tp), (FORWARD, BACKWARD)
    return [_predict(system, strategy, linear, direction, methods) for linear in linears for direction in ways]


def count_tiles(strategy: Strategy, model: Model) -> int:
    """Tiles of one rank's products beside communication in a layer and the output layer, forward and for dx: about what `fused`,
    and once more `direct`, have a simulation take one by one."""
    forward = [passes_of(linear, strategy) for linear in linears_of(model, strategy.tp)]
    passes = [p for first in forward if first.world > 1 for p in (first, first.dgrad)]
    return sum(HOPPER_TILE.count(p.rows, p.n) for p in passes)


def passes_of(linear: Linear, strategy: Strategy) -> Pass:
    """What one rank multiplies in the forward pass. With Ulysses the linears that it leaves alone have a part of the rows."""
    if strategy.cp == 1:
        return forward_pass(linear, strategy.rows, strategy.tp)
    if linear.name not in EXCHANGED:
        return forward_pass(linear, strategy.rows // strategy.cp, 1)
    kind = GEMM_A2A if linear.is_column else A2A_GEMM
    return Pass(kind, strategy.rows, linear.n, linear.k, torch.bfloat16, strategy.cp)


def forward_pass(linear: Linear, rows: int, world: int) -> Pass:
    """What one rank multiplies in the forward pass of a linear under tensor parallelism."""
    if linear.is_column:
        return Pass(GATHER, rows, linear.n // world, linear.k, torch.bfloat16, world)
    return Pass(SCATTER, rows, linear.n, linear.k // world, torch.bfloat16, world)


def _predict(
    system: System, strategy: Strategy, linear: Linear, direction: str, methods: tuple[str, ...]
) -> Prediction:
    first = passes_of(linear, strategy)
    is_backward = direction == BACKWARD
    pass_ = first.dgrad if is_backward else first
    nodes = strategy.nodes if pass_.world > 1 else 1
    served = [method for method in methods_of(nodes) if method in methods]
    works = {method: work_of(system, pass_, method, UNTUNED, nodes=nodes) for method in served}
    alone = works[COLLECTIVE]
    gemm_us = alone.gemm_us + (wgrad_us(alone) if is_backward else 0.0)
    nccl_us = communication_us(alone) if is_backward else alone.collective_us
    estimates = {
        method: estimate(work, backward(work) if is_backward else program(work)) for method, work in works.items()
    }
    return Prediction(linear.name, direction, pass_.rows, pass_.n, pass_.k, gemm_us, nccl_us, estimates)


def methods_of(nodes: int) -> tuple[str, ...]:
    """The methods with engines for a group that spans so many nodes (planning/refusals.py: why_not_across_nodes)."""
    return METHODS if nodes == 1 else BY_LIBRARY


def work_of(system: System, pass_: Pass, method: str, table: Table, is_alone: bool = False, nodes: int = 1) -> Work:
    """A pass as `auto` or a method would run it on that machine, by its plan. is_alone: without the wgrad that splits it. nodes:
    that its group spans."""
    target, topology = Target(system.capability), Topology(nodes, pass_.world // nodes, RANK)
    choice = choose(method, pass_, target, table)  # type: ignore[arg-type]  # a GPU that need not be here
    if is_alone:
        choice = alone(choice, pass_, target)  # type: ignore[arg-type]
    weight = torch.empty(pass_.n, pass_.k, dtype=pass_.dtype, device="meta")
    sms = NodeSms(network_sms(system.nic_gbs), reduce_sms(system, topology.local))
    plan = engine_plan(choice, pass_, topology, target, weight, sms)  # type: ignore[arg-type]
    return Work(system, plan, pass_, topology)


def estimate(work: Work, what: Program) -> Estimate:
    timeline = simulate([what], work.system.copy_gbs, work.system.nic_gbs)
    plan = work.plan
    return Estimate(plan.method, plan.variant.named(plan.method), timeline.us, what.host_us, timeline)


def total(predictions: Iterable[Prediction]) -> Sum:
    """The Sum of these passes: by NCCL everywhere, and by what was chosen."""
    rows = list(predictions)
    without, ours = [p.by_method[COLLECTIVE] for p in rows], [p.chosen for p in rows]
    return Sum(
        sum(p.gemm_us for p in rows), sum(p.nccl_us for p in rows), _run_us(without), _run_us(ours)
    )  # fmt: skip


def _run_us(estimates: Iterable[Estimate]) -> float:
    """Microseconds of passes one after the other: the host may be ahead in one and late in another."""
    some = list(estimates)
    return max(sum(e.device_us for e in some), sum(e.host_us for e in some))


def in_layer(predictions: Iterable[Prediction]) -> list[Prediction]:
    """The predictions without those of the output layer, of which a model has one."""
    return [p for p in predictions if p.linear != OUTPUT]
