"""What each pass of each linear takes by each method, and what to choose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from ...planning.machines import System
from ...planning.table import SAME, UNTUNED
from ...schedule.order import A2A_GEMM, EXCHANGES, GATHER, GEMM_A2A, SCATTER
from ...select.passes import Pass
from ...select.tiling import HOPPER_TILE
from ..measure.models import Model
from .estimates import COLLECTIVE, METHODS, Estimate, estimate, methods_of, work_of
from .fits import check
from .inputs import EXCHANGED, OUTPUT, Linear, Strategy, linears_of
from .simulation.backward import backward, communication_us, wgrad_us
from .simulation.programs import program
from .simulation.work import ANGLE_BYTES, AttentionSide
from .two_groups import projection

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Prediction:
    """One pass of one linear. m, n, k: of one rank's product. gemm_us, nccl_us: each half of the work alone. parts: of which the
    product of one hides the exchange of another, under TP x Ulysses."""

    linear: str
    direction: str
    m: int
    n: int
    k: int
    gemm_us: float
    nccl_us: float
    by_method: Mapping[str, Estimate]
    parts: int = 1

    @property
    def bound_us(self) -> float:
        """Perfect overlap of cuBLAS and NCCL, as the benchmarks define it."""
        return max(self.gemm_us, self.nccl_us)

    @property
    def chosen(self) -> Estimate:
        """The fastest. What differs by no more than two measurements of one thing is a tie: NCCL's, else the first one's."""
        without = self.by_method[COLLECTIVE]
        fastest = min(e.us for e in self.by_method.values())
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
    return [_predict(system, strategy, model, linear, direction, methods) for linear in linears for direction in ways]


def count_tiles(strategy: Strategy, model: Model) -> int:
    """Tiles of one rank's products beside communication in a layer and the output layer, forward and for dx: about what `fused`,
    and once more `direct`, have a simulation take one by one."""
    forward = [passes_of(linear, strategy) for linear in linears_of(model, strategy.tp)]
    passes = [p for first in forward if first.world > 1 for p in (first, first.dgrad)]
    return sum(HOPPER_TILE.count(p.rows, p.n) for p in passes)


def passes_of(linear: Linear, strategy: Strategy) -> Pass:
    """What one rank multiplies in the forward pass. With Ulysses all linears have a part of the rows; where weights are whole,
    its projections are operators of its group."""
    if strategy.cp == 1 or strategy.tp > 1 or linear.name not in EXCHANGED:
        return forward_pass(linear, strategy.rows // strategy.cp, strategy.tp)
    kind = GEMM_A2A if linear.is_column else A2A_GEMM
    return Pass(kind, strategy.rows, linear.n, linear.k, torch.bfloat16, strategy.cp)


def forward_pass(linear: Linear, rows: int, world: int) -> Pass:
    """What one rank multiplies in the forward pass of a linear under tensor parallelism."""
    if linear.is_column:
        return Pass(GATHER, rows, linear.n // world, linear.k, torch.bfloat16, world)
    return Pass(SCATTER, rows, linear.n, linear.k // world, torch.bfloat16, world)


def _predict(
    system: System, strategy: Strategy, model: Model, linear: Linear, direction: str, methods: tuple[str, ...]
) -> Prediction:
    if not strategy.is_grid or linear.name not in EXCHANGED:
        return _in_one_group(system, strategy, model, linear, direction, methods)
    over_tp = _in_one_group(system, strategy, model, linear, direction, (COLLECTIVE,))
    both = projection(system, strategy, model, linear)
    served = methods_of(strategy.tp_nodes, methods)
    by_method = {method: both.estimate(method, direction == BACKWARD) for method in served}
    return replace(over_tp, nccl_us=over_tp.nccl_us + both.exchange_us, by_method=by_method, parts=len(both.parts))


def side_of(strategy: Strategy, model: Model, linear: Linear) -> AttentionSide:
    """What the attention has of one of its projections. The sequences of a batch share their cos and sin."""
    return AttentionSide(float(strategy.seq * model.head_width * ANGLE_BYTES) if linear.is_column else None)


def _in_one_group(
    system: System, strategy: Strategy, model: Model, linear: Linear, direction: str, methods: tuple[str, ...]
) -> Prediction:
    first = passes_of(linear, strategy)
    is_backward = direction == BACKWARD
    pass_ = first.dgrad if is_backward else first
    nodes = strategy.cp_nodes if pass_.kind in EXCHANGES else strategy.tp_nodes
    served = methods_of(nodes, methods)
    side = side_of(strategy, model, linear) if pass_.kind in EXCHANGES else None
    works = {method: work_of(system, pass_, method, UNTUNED, nodes=nodes, side=side) for method in served}
    alone = works[COLLECTIVE]
    gemm_us = alone.gemm_us + (wgrad_us(alone) if is_backward else 0.0)
    nccl_us = communication_us(alone) if is_backward else alone.collective_us
    estimates = {
        method: estimate(work, backward(work) if is_backward else program(work), method)
        for method, work in works.items()
    }
    return Prediction(linear.name, direction, pass_.rows, pass_.n, pass_.k, gemm_us, nccl_us, estimates)


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
