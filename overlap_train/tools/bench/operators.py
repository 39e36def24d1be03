"""The operator benchmark: each pass by each method, and its baselines, in the same interleaved rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...group.slots import SLOTS
from ...schedule.order import GEMM_A2A
from ...ulysses.linears import all_to_all_linear, linear_all_to_all
from ..measure.cases import EXCHANGES, Case
from ..measure.results import Row
from ..measure.runs import Inputs, Run, Session, overlapped, problem_of
from ..measure.timing import Timing
from .baselines import baselines_of
from .node_baselines import node_baselines
from .node_domains import Domains, Ours
from .output import label_of

NEEDED = {"sequence", "gemm", "comm"}  # no row without them
TIMED_ONLY = ("gemm", "comm")


@torch.no_grad()
def run(cases: list[Case], session: Session, network_sms: Sequence[int] = ()) -> None:
    """Measure every case and add its rows to the session's results, which are saved after each of them. Collective.

    network_sms: numbers of SMs that the network between nodes gets, besides the own one.
    """
    domains = Domains.of(session, [_slot_bytes(case, session) for case in cases], network_sms)
    for number, case in enumerate(cases):
        rows = measure_case(case, domains, session)
        session.results.add(rows)
        session.world.say(f"[{number + 1}/{len(cases)}] {case.name}: {session.results.outcome(rows, label_of)}")


def measure_case(case: Case, domains: Domains, session: Session) -> list[Row]:
    """Check, then time, every method and baseline of one case; one row for each method that computes the right thing."""
    inputs, settings, world = inputs_of(case, session), session.settings, session.world
    if inputs is None:
        return []
    ours = domains.ours(case, session)
    runs = correct_runs(case, inputs, ours, domains, session)
    if not runs.keys() >= NEEDED:
        return []
    timings = session.time({name: inputs.call(run) for name, run in runs.items()}, case.flops(world.size))
    return [
        row(case, mine.method, timings | {mine.method: timings[name]}, world.size, settings.dtype)
        | domains.told(mine.domain)
        for name, mine in ours.items()
        if name in timings
    ]


def inputs_of(case: Case, session: Session) -> Inputs | None:
    """The inputs of a case and its exact result; None, with a note, where they do not fit into memory: other cases may.

    They are as large on all ranks, and so memory runs out on all.
    """
    made: list[Inputs] = []
    problem = session.world.attempt(lambda: made.append(Inputs(case, session)))
    if problem is None:
        return made[0]
    session.results.note(f"{case.name}: inputs: {problem}", failure=True)
    return None


def correct_runs(
    case: Case, inputs: Inputs, ours: Mapping[str, Ours], domains: Domains, session: Session
) -> dict[str, Run]:
    """Methods and baselines that gave the right result on every rank; notes about the others."""
    runs = {name: run_of(case, mine, inputs) for name, mine in ours.items()}
    correct = {}
    baselines = baselines_of(case, session.world, (*inputs.sets, inputs.decoy))
    baselines |= node_baselines(case, domains.groups, inputs.first)
    if domains.own.topology.nodes > 1:  # PyTorch's async-TP stays in a node
        baselines.pop("async_tp", None)
    for name, run in (runs | baselines).items():
        problem = problem_of(case.name, run, inputs, session.world, is_exact=name not in TIMED_ONLY)
        if problem is None:
            correct[name] = run
        else:
            session.results.note(f"{case.name}: {name}: {problem}", failure=name != "async_tp")
    return correct


def run_of(case: Case, mine: Ours, inputs: Inputs) -> Run:
    """A pass by one of our methods."""
    if case.op in EXCHANGES:
        return exchanged(case, mine)
    return overlapped(case, mine.domain, mine.choice, inputs.first)


def exchanged(case: Case, mine: Ours) -> Run:
    """A pass of Ulysses as users call it: long sequences in parts. The dgrad of one operator, without a weight gradient, runs as
    the other's forward pass does."""
    config, group = replace(mine.domain.config, method=mine.method), mine.domain.group
    operator = linear_all_to_all if case.kind == GEMM_A2A else all_to_all_linear
    return lambda o: operator(o.left, o.right.t(), group=group, config=config, name=f"{case.op}/{case.pass_}")


def _slot_bytes(case: Case, session: Session) -> int:
    """Bytes of a slot for the largest call of a case; long exchanges pass in parts."""
    needed = case.slot_bytes(session.world.size, session.settings.dtype)
    most = session.settings.config.exchange_mib * (1 << 20) // SLOTS
    return min(needed, most) if case.op in EXCHANGES else needed


def row(case: Case, method: str, timings: dict[str, Timing], world: int, dtype: torch.dtype) -> Row:
    """One line of operators.json; times in milliseconds of one run, host_us in microseconds."""
    async_tp = timings.get("async_tp")
    sequence, gemm = timings["sequence"].ms, timings["gemm"].ms
    comm, three_gemms = timings["comm"].ms, timings.get("three_gemms")
    by_nodes = {"by_nodes_ms": timings["by_nodes"].ms} if "by_nodes" in timings else {}
    return {
        "op": case.op, "pass": case.pass_, "world": world, "m": case.m, "n": case.n, "k": case.k,
        "dtype": str(dtype).removeprefix("torch."), "method": method, "ms": timings[method].ms,
        "host_us": timings[method].host_us, "sequence_ms": sequence, "async_tp_ms": async_tp and async_tp.ms,
        "gemm_ms": gemm, "comm_ms": comm, "bound": sequence / max(gemm, comm),
    } | by_nodes | ({"three_gemms_ms": three_gemms and three_gemms.ms} if case.op in EXCHANGES else {})  # fmt: skip
