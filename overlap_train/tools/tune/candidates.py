"""What is measured: passes, each by every candidate method with its options, on all ranks, as the benchmark measures.

Every rank has the same figures, those of the slowest, and therefore comes to the same answer (select/choose.py: fastest).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from ...config import OverlapConfig
from ...group.domain import OverlapDomain
from ...group.memory import Request
from ...linear import column_backward
from ...ops.plan import Plan, planner_of
from ...ops.planned import PlannedOp
from ...ops.spec import ALL_GATHER_LINEAR
from ...ops.wgrad import WeightGradient
from ...select.choose import Choice, fastest, untuned, with_options
from ...select.cost import Estimate, reach_of
from ...select.method import CHUNK_COUNTS, Method, Pass, serving
from ...select.system import System
from ...select.table import Winner
from ...select.tiles import chunks_of, equal_chunks
from ...ulysses.parts import cut_exchange
from ..measure.cases import OPERATORS, Case, cases_of, check_divisible
from ..measure.models import MODELS, OPS_OF_LINEARS, OPS_OF_PROJECTIONS
from ..measure.runs import Operands, Run, Session, inputs_of, overlapped, plan_of, problem_of
from ..measure.timing import Call

# A barrier takes 10 microseconds; collisions of shorter copies cost less than that.
_SHORT_COPY_US = 40.0
_SHORTEST_MESSAGE = 1 << 20  # between nodes: what a NIC sends within the latency of a message


def model_cases(model: str, rows: Iterable[int], ranks: int, ulysses: bool = False) -> list[Case]:
    """fprop and dgrad of a model's linears for each M of `rows`. ulysses: of the projections of its attention under Ulysses; of a
    long sequence the first part. Raises ValueError where a size cannot be shared by the ranks."""
    weights, found = MODELS[model].linears, []
    for m, (slot, op) in itertools.product(rows, (OPS_OF_PROJECTIONS if ulysses else OPS_OF_LINEARS).items()):
        if slot not in weights:  # the output layer
            continue
        check_divisible("--seq", m, ranks)
        if ulysses:
            features = weights[slot][0 if OPERATORS[op].splits_columns else 1]  # that are sent, of two bytes each
            ((_, positions), *_) = cut_exchange(m // ranks, 1, features * 2, OverlapConfig())
            m = positions * ranks
        found += cases_of(slot, op, weights[slot], m, ranks, f"--model {model}: {slot}")
    return found


def one_a_bucket(cases: Iterable[Case], ranks: int) -> list[Case]:
    """The first of each bucket, in which a winner counts for all; largest M first, for which buffers are allocated."""
    found: dict[Any, Case] = {}
    for case in sorted(cases, key=lambda case: -case.m):
        found.setdefault(case.planned(ranks, torch.float32).bucket, case)
    return list(found.values())


def variants_of(pass_: Pass, name: str, device: torch.device | System, nodes: int = 1) -> list[Method]:
    """The options of a method that are worth a measurement, plain first.

    Across nodes: numbers of chunks that cut a block into equal ones, none too short for a message. Inside a node: whole blocks,
    where the method would cut them; a split reduction, in a column linear's backward, whose weight gradient can run in between,
    and where it saves half a wave of tiles or more; a barrier first, where pushes of several ranks may meet on one link.
    """
    plain, system = Method(name), System.of(device)
    if not reach_of(nodes).has_rules:
        if not plain.pushes:
            return [plain]
        rows = pass_.m // pass_.world
        most = rows * pass_.row_bytes // _SHORTEST_MESSAGE if system.type == "cuda" else rows
        fits = [count for count in CHUNK_COUNTS if count <= max(1, most) and equal_chunks(rows, count) == count]
        return [plain, *(replace(plain, chunks=count) for count in fits)]
    cuts = plain.cuts and chunks_of(plain, pass_, system) > 1
    # A column linear's backward starts with a barrier in any case: `backward` below needs one for its slots.
    is_free = not (pass_.kind.exchanges or pass_.kind.before_wgrad)
    copies_us = pass_.sent_bytes / (system.copy_gbs * 1e3)
    collides = pass_.world > 2 and plain.pushes and copies_us > _SHORT_COPY_US and is_free
    may_split = plain.cuts and pass_.kind.reduces
    splits = may_split and (pass_.kind.before_wgrad or with_options(name, pass_, system).split_reduction)
    options = itertools.product(*((False, True) if may else (False,) for may in (cuts, splits, collides)))
    return [Method(name, *each) for each in options]


@torch.no_grad()
def tune_case(case: Case, domain: OverlapDomain, session: Session) -> Winner | None:
    """The winner of one pass, None if no method works: of those that give the right result on every rank, in all variants. What
    fails is left out and noted in the results. Collective."""
    world, results = session.world, session.results
    planned, nodes = case.planned(world.size, session.dtype), domain.topology.nodes
    default = untuned(planned, world.device, nodes).method
    inputs, calls = inputs_of(case, session), dict[Method, Call]()
    run_of = _backward if planned.kind.before_wgrad else overlapped
    for name in filter(reach_of(nodes).may_choose, serving(session.methods, planned)):
        for how in variants_of(planned, name, domain.device, nodes):
            run = run_of(case, domain, Choice(how, "a candidate"), inputs.first)
            problem = problem_of(case.name, run, inputs, world, inputs.check)
            if problem is None:
                calls[how] = inputs.call(run)
            else:
                results.note(f"{case.name}: {how} left out: {problem}", failure=False)
    if not any(how.is_plain for how in calls):
        results.note(f"{case.name}: no method works, so nothing is stored", failure=True)
        return None
    timings = session.time({str(how): call for how, call in calls.items()}, case.flops(world.size))
    took = {how: timings[str(how)] for how in calls}
    how = fastest({how: Estimate(1e3 * one.ms, one.host_us) for how, one in took.items()}, default)
    return Winner(planned, how, {how: one.ms for how, one in took.items()})


def _backward(case: Case, domain: OverlapDomain, choice: Choice, like: Operands) -> Run:
    """A column linear's whole backward. Without the weight gradient, a method whose reduction ends under that gradient would look
    slower than it is."""
    # With a barrier, whether training has one or not: one backward after another needs it for its slots.
    dgrad = replace(plan_of(case, domain, choice.by(barrier_first=True), like), beside_wgrad=True)
    wgrad = planner_of(domain.topology, domain.config).sent_again(replace(dgrad, kind=dgrad.kind.dgrad))
    request = Request(case.op, f"{case.name} by {choice.how}")
    plan = Plan(ALL_GATHER_LINEAR, domain.config, dgrad, dgrad, dgrad, wgrad, request, like.left.dtype, case.m)
    linear = PlannedOp(domain, plan, f"tune {choice.how}", (), trains=True)

    def run(o: Operands) -> torch.Tensor | None:
        x_shard_m = o.whole.chunk(domain.world_size)[domain.rank]  # any rows do: o.whole is as large as x
        return column_backward(linear, o.left, x_shard_m, o.right, WeightGradient(o.right, "off"), wants_dx=True)

    return run
