"""The operator benchmark: each pass by each method, and its baselines, in the same interleaved rounds."""

from __future__ import annotations

import torch

from ...operators.plan_book import book_of
from ...planning.choice import choose
from ...runtime.domain import OverlapDomain
from ..measure.cases import Case
from ..measure.results import Row
from ..measure.runs import Inputs, Run, Session, overlapped, problem_of
from ..measure.timing import Timing
from .baselines import baselines_of

NEEDED = {"sequence", "gemm", "comm"}  # no row without them
TIMED_ONLY = ("gemm", "comm")


@torch.no_grad()
def run(cases: list[Case], session: Session) -> None:
    """Measure every case and add its rows to the session's results, which are saved after each of them. Collective."""
    domain = session.domain(max(case.slot_bytes(session.settings.dtype) for case in cases))
    for number, case in enumerate(cases):
        rows = measure_case(case, domain, session)
        session.results.add(rows)
        times = ", ".join(f"{row['method']} {row['ms']:.3f} ms" for row in rows)
        session.world.say(f"[{number + 1}/{len(cases)}] {case.name}: {times or 'no result'}")


def measure_case(case: Case, domain: OverlapDomain, session: Session) -> list[Row]:
    """Check, then time, every method and baseline of one case; one row for each method that computes the right thing."""
    inputs, settings, world = Inputs(case, session), session.settings, session.world
    runs = correct_runs(case, inputs, domain, session)
    if not runs.keys() >= NEEDED:
        return []
    timings = session.time({name: inputs.call(run) for name, run in runs.items()}, case.flops(world.size))
    return [row(case, method, timings, world.size, settings.dtype) for method in settings.methods if method in timings]


def correct_runs(case: Case, inputs: Inputs, domain: OverlapDomain, session: Session) -> dict[str, Run]:
    """Methods and baselines that gave the right result on every rank; notes about the others."""
    planned, table = case.planned(session.world.size, session.settings.dtype), book_of(domain).table
    runs: dict[str, Run] = {
        method: overlapped(case, domain, choose(method, planned, domain.device, table), inputs.first)
        for method in session.settings.methods
    }
    correct = {}
    for name, run in (runs | baselines_of(case, session.world, inputs.first)).items():
        problem = problem_of(case.name, run, inputs, session.world, is_exact=name not in TIMED_ONLY)
        if problem is None:
            correct[name] = run
        else:
            session.results.note(f"{case.name}: {name}: {problem}", failure=name != "async_tp")
    return correct


def row(case: Case, method: str, timings: dict[str, Timing], world: int, dtype: torch.dtype) -> Row:
    """One line of operators.json; times in milliseconds of one run, host_us in microseconds."""
    async_tp = timings.get("async_tp")
    sequence, gemm = timings["sequence"].ms, timings["gemm"].ms
    comm = 0.0 if case.kind == "weight" and case.op == "gemm_rs" else timings["comm"].ms  # there is none
    return {
        "op": case.op, "pass": case.pass_, "world": world, "m": case.m, "n": case.n, "k": case.k,
        "dtype": str(dtype).removeprefix("torch."), "method": method, "ms": timings[method].ms,
        "host_us": timings[method].host_us, "sequence_ms": sequence, "async_tp_ms": async_tp and async_tp.ms,
        "gemm_ms": gemm, "comm_ms": comm, "bound": sequence / max(gemm, comm),
    }  # fmt: skip
