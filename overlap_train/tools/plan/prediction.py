"""What each pass of each linear takes by each method, and what to choose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from ...schedule.order import A2A_GEMM, EXCHANGES, GATHER, GEMM_A2A, SCATTER
from ...select.choose import untuned, with_options
from ...select.cost import Estimate, library_us
from ...select.method import NAMES, Method
from ...select.passes import Pass
from ...select.reach import reach_of
from ...select.system import System
from ...ulysses.parts import parts_that_hide
from ..measure.models import Model
from .inputs import EXCHANGED, OUTPUT, Linear, Strategy, check, linears_of

FORWARD, BACKWARD = "forward", "backward"
METHODS = tuple(name for name in NAMES if not Method(name).few_rows)  # plans are for long sequences
COLLECTIVE = "collective"


@dataclass(frozen=True)
class Prediction:
    """One pass of one linear. m, n, k: of one rank's GEMM. gemm_us, nccl_us: each half of the work alone. chosen: what `auto`
    takes."""

    linear: str
    direction: str
    m: int
    n: int
    k: int
    gemm_us: float
    nccl_us: float
    by_method: Mapping[str, Estimate]
    chosen: str

    @property
    def bound_us(self) -> float:
        """Perfect overlap of cuBLAS and NCCL, as the benchmarks define it."""
        return max(self.gemm_us, self.nccl_us)


@dataclass(frozen=True)
class Sum:
    """The sum of several passes, in microseconds: without overlap, and by what was chosen. The host counts where it takes
    longer than the GPU in all of them together."""

    gemm_us: float
    nccl_us: float
    without_us: float
    ours_us: float

    @property
    def exposed_us(self) -> float:
        """What communication adds to the GEMMs."""
        return max(0.0, self.ours_us - self.gemm_us)

    @property
    def gain(self) -> float:
        return self.without_us / self.ours_us if self.ours_us else 1.0


def predict(system: System, strategy: Strategy, model: Model) -> list[Prediction]:
    """Forward and backward of all linears by all methods that serve them. Raises ValueError for what cannot be planned."""
    check(system, strategy, model)
    linears = linears_of(model, strategy.tp)
    return [_predict(system, strategy, linear, d == BACKWARD) for linear in linears for d in (FORWARD, BACKWARD)]


def first_pass(linear: Linear, strategy: Strategy) -> Pass:
    """What one rank multiplies in the forward pass. With Ulysses all linears have a part of the rows; where weights are whole,
    its projections are operators of its group."""
    s, dtype = strategy, torch.bfloat16
    if s.cp > 1 and s.tp == 1 and linear.name in EXCHANGED:
        return Pass(GEMM_A2A if linear.is_column else A2A_GEMM, s.rows, linear.n, linear.k, dtype, s.cp)
    if linear.is_column:
        return Pass(GATHER, s.rows // s.cp, linear.n // s.tp, linear.k, dtype, s.tp)
    return Pass(SCATTER, s.rows // s.cp, linear.n, linear.k // s.tp, dtype, s.tp)


def _predict(system: System, strategy: Strategy, linear: Linear, is_backward: bool) -> Prediction:
    first = first_pass(linear, strategy)
    p = first.dgrad if is_backward else first
    nodes = strategy.cp_nodes if p.kind in EXCHANGES else strategy.tp_nodes
    chosen, reach = untuned(p, system, nodes).method, reach_of(nodes)
    names = dict.fromkeys([*(name for name in METHODS if reach.may_choose(name)), chosen])
    by_method = {
        name: reach.estimate(p, with_options(name, p, system, nodes=nodes), system, is_backward) for name in names
    }
    gemm_us = library_us(system, p.rows, p.n, p.k) + (library_us(system, p.k, p.n, p.rows) if is_backward else 0.0)
    nccl_us = reach.collective_us(p, system) * (1 + (is_backward and first.kind == GATHER))
    found = Prediction(
        linear.name, BACKWARD if is_backward else FORWARD, p.rows, p.n, p.k, gemm_us, nccl_us, by_method, chosen
    )
    if strategy.tp > 1 and strategy.cp > 1 and linear.name in EXCHANGED:
        return _beside_ulysses(system, strategy, linear, found)
    return found


def _beside_ulysses(system: System, strategy: Strategy, linear: Linear, over_tp: Prediction) -> Prediction:
    """A projection under TP x Ulysses: the GEMM of one part hides the exchange of another, of which one part stays. Apart
    across nodes."""
    s, features = strategy, linear.n if linear.is_column else linear.k
    exchange = Pass(A2A_GEMM, s.rows, 1, features // s.tp, torch.bfloat16, s.cp)
    nccl_us = reach_of(s.cp_nodes).collective_us(exchange, system)
    parts = parts_that_hide(over_tp.m, over_tp.n, over_tp.k, system) if s.nodes == 1 else 1

    def both(name: str, one: Estimate) -> Estimate:
        apart = name == COLLECTIVE or parts == 1
        return replace(
            one, device_us=one.device_us + nccl_us if apart else max(one.device_us, nccl_us) + nccl_us / parts
        )

    by_method = {name: both(name, one) for name, one in over_tp.by_method.items()}
    return replace(over_tp, nccl_us=over_tp.nccl_us + nccl_us, by_method=by_method)


def total(predictions: Iterable[Prediction]) -> Sum:
    """The Sum of these passes: by NCCL everywhere, and by what was chosen."""
    rows = list(predictions)
    without, ours = run_us(p.by_method[COLLECTIVE] for p in rows), run_us(p.by_method[p.chosen] for p in rows)
    return Sum(sum(p.gemm_us for p in rows), sum(p.nccl_us for p in rows), without, ours)


def run_us(estimates: Iterable[Estimate]) -> float:
    """Microseconds of passes one after the other: the host may be ahead in one and late in another."""
    some = list(estimates)
    return max(sum(e.device_us for e in some), sum(e.host_us for e in some))


def in_layer(predictions: Iterable[Prediction]) -> list[Prediction]:
    """The predictions without those of the output layer, of which a model has one."""
    return [p for p in predictions if p.linear != OUTPUT]
