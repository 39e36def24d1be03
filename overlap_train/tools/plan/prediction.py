"""What each pass of each linear takes by each method, what `auto` takes, and their sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...flags import option, positive_int, positive_int_or_0
from ...select.choose import untuned, with_options
from ...select.cost import Estimate, library_us, reach_of
from ...select.method import LOW_LATENCY, NAMES
from ...select.system import System
from ..measure.cases import Case, cases_of, check_divisible
from ..measure.models import OPS_OF_LINEARS, OPS_OF_PROJECTIONS, Model

METHODS = tuple(name for name in NAMES if name != LOW_LATENCY)  # plans are for long sequences
COLLECTIVE, OUTPUT = "collective", "output"
_VOCAB_MULTIPLE = 128  # Megatron-Core pads the vocabulary to a multiple of this times the ranks


@dataclass(frozen=True)
class Strategy:
    """How a model is spread, and what goes through it at once. Every field is a flag of `plan`."""

    tp: int = option(
        0, "tensor-parallel size; 0: 1 beside --cp, all GPUs with --nodes, else 4", parse=positive_int_or_0
    )
    cp: int = option(1, "ranks that share the sequence (Ulysses)", parse=positive_int)
    nodes: int = option(1, "nodes that one group spans", parse=positive_int)
    seq: int = option(8192, "sequence length", parse=positive_int, metavar="TOKENS")
    micro_batch: int = option(1, "sequences in one forward call", parse=positive_int)

    @property
    def rows(self) -> int:
        """M of all linears."""
        return self.seq * self.micro_batch

    @property
    def ranks(self) -> int:
        """GPUs of one copy of the model."""
        return self.tp * self.cp


@dataclass(frozen=True)
class Prediction:
    """One pass of one linear, or a sum of several. sizes: M, N, K of one rank's GEMM. gemm_us, nccl_us: each half of the work
    alone. by_method: of those that serve. ours: by what `auto` takes, which is `chosen`."""

    linear: str
    direction: str
    sizes: tuple[int, ...]
    gemm_us: float
    nccl_us: float
    by_method: Mapping[str, Estimate]
    ours: Estimate
    chosen: str

    @property
    def exposed_us(self) -> float:
        """What communication adds to the GEMMs."""
        return max(0.0, self.ours.us - self.gemm_us)

    @property
    def gain(self) -> float:
        return self.by_method[COLLECTIVE].us / self.ours.us


def predict(system: System, s: Strategy, model: Model) -> list[Prediction]:
    """Forward and backward of all linears by all methods that serve them; the output layer last, if the vocabulary is known.

    Raises:
        ValueError: ranks that do not fill the nodes, or sizes that so many ranks cannot share.
    """
    asked, local = f"{s.ranks} ranks on {s.nodes} nodes", s.ranks // s.nodes
    if s.ranks % s.nodes or local > system.gpus_per_node:
        raise ValueError(
            f"{asked}: each node must have as many, and at most {system.gpus_per_node}; set --nodes, or --tp and --cp"
        )
    if s.tp > 1 and s.cp > 1:
        raise ValueError(f"--tp {s.tp} with --cp {s.cp}: both at once are not estimated; plan one of them")
    check_divisible("--seq times --micro-batch", s.rows, s.ranks)
    weights = dict(model.linears)
    if model.vocab_size:
        step = _VOCAB_MULTIPLE * s.tp
        weights[OUTPUT] = (-(-model.vocab_size // step) * step, model.hidden_size)
    found = []
    for name, weight in weights.items():
        # Under Ulysses weights are whole: its projections are operators of its group, and other linears have a part of the rows.
        if name in OPS_OF_PROJECTIONS and s.cp > 1:
            cases = cases_of(name, OPS_OF_PROJECTIONS[name], weight, s.rows, s.cp, name)
        else:
            cases = cases_of(name, OPS_OF_LINEARS[name], weight, s.rows // s.cp, s.tp, name)
        found += [_predict(system, s, case) for case in cases]
    return found


def _predict(system: System, s: Strategy, case: Case) -> Prediction:
    p = case.planned(s.cp if case.kind.exchanges else s.tp, torch.bfloat16)
    nodes = s.nodes if p.world > 1 else 1
    is_backward, reach, chosen = case.pass_ == "dgrad", reach_of(nodes), untuned(p, system, nodes).method
    names = dict.fromkeys([*filter(reach.may_choose, METHODS), chosen])
    by_method = {
        name: reach.estimate(p, with_options(name, p, system, nodes=nodes), system, is_backward) for name in names
    }
    gemm_us = library_us(system, p.rows, p.n, p.k) + (library_us(system, p.k, p.n, p.rows) if is_backward else 0.0)
    nccl_us = reach.collective_us(p, system) * (1 + p.kind.before_wgrad)  # x is sent again
    direction = "backward" if is_backward else "forward"
    sizes, ours = (p.rows, p.n, p.k), by_method[chosen]
    return Prediction(case.model, direction, sizes, gemm_us, nccl_us, by_method, ours, chosen)


def total(linear: str, direction: str, some: Sequence[Prediction]) -> Prediction:
    """The sum of these passes."""
    served = [name for name in METHODS if all(name in p.by_method for p in some)]
    by_method = {name: in_a_row(p.by_method[name] for p in some) for name in served}
    gemm_us, nccl_us = sum(p.gemm_us for p in some), sum(p.nccl_us for p in some)
    return Prediction(linear, direction, (), gemm_us, nccl_us, by_method, in_a_row(p.ours for p in some), "-")


def in_a_row(estimates: Iterable[Estimate]) -> Estimate:
    """Of passes one after the other: the host may be ahead in one and late in another."""
    some = list(estimates)
    return Estimate(sum(e.device_us for e in some), sum(e.host_us for e in some))
