"""The operator benchmark: each pass by each method, and its rivals, in the same interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..choice import GATHER, SCATTER, Choice, Pass, choose
from ..domain import Demand, OverlapDomain
from ..operators.all_gather_gemm import start_all_gather, start_all_gather_whole
from ..operators.gemm_reduce_scatter import start_gemm_reduce_scatter
from ..registry import check as check_timeouts
from ..registry import domain_of
from .check import Reference, check, product_reference, scatter_reference
from .operands import Operands, make_operands
from .output import Results
from .rivals import into_target, rivals_of
from .settings import Settings
from .shapes import Case
from .timing import Call, Timing, input_sets, measure, pace
from .world import World

Run = Callable[[Operands], torch.Tensor]
YARDSTICKS = {"sequence", "gemm", "comm"}  # no row without them


def run(cases: list[Case], settings: Settings, world: World, results: Results) -> None:
    """Measure every case and add its rows to `results`, which is saved after each of them. Collective."""
    domain = open_domain(cases, settings, world)
    with torch.no_grad():
        for number, case in enumerate(cases):
            rows = measure_case(case, settings, domain, world, results)
            results.add(rows)
            times = ", ".join(f"{row['method']} {row['ms']:.3f} ms" for row in rows)
            world.say(f"[{number + 1}/{len(cases)}] {case.name}: {times or 'no result'}")


def open_domain(cases: list[Case], settings: Settings, world: World) -> OverlapDomain:
    """The domain with symmetric memory for the largest case, so that it is allocated once."""
    domain = domain_of(world.group, settings.config, world.device)
    largest = max((slot_bytes(case, settings.dtype) for case in cases), default=0)
    domain.prepare(Demand("overlap_train.bench", "the largest case", largest), None)
    return domain


def slot_bytes(case: Case, dtype: torch.dtype) -> int:
    """Of what one rank receives: M rows of the features that are not sharded."""
    return case.m * (case.k if case.op == "ag_gemm" else case.n) * dtype.itemsize


def measure_case(
    case: Case, settings: Settings, domain: OverlapDomain, world: World, results: Results
) -> list[dict[str, Any]]:
    """Check, then time, every method and rival of one case; one row for each method that computes the right thing."""
    first, decoy = (make_operands(case, world, settings.dtype, seed) for seed in (0, 99))
    runs = correct_runs(case, first, decoy, settings, domain, world, results)
    if not runs.keys() >= YARDSTICKS:
        return []
    more = [make_operands(case, world, settings.dtype, seed) for seed in range(1, input_sets(first.nbytes))]
    calls = {name: rotating(run, [first, *more]) for name, run in runs.items()}
    timings = measure(calls, pace(case.flops(world.size), settings.quick), world.group, world.device)
    return [row(case, method, timings, world.size, settings.dtype) for method in settings.methods if method in timings]


def correct_runs(
    case: Case,
    first: Operands,
    decoy: Operands,
    settings: Settings,
    domain: OverlapDomain,
    world: World,
    results: Results,
) -> dict[str, Run]:
    """Methods and rivals that gave the right result on every rank; notes about the others."""
    reference, rivals = reference_of(case, first, world), rivals_of(case.op, case.kind, world.group, first)
    pass_ = pass_of(case, world.size, settings.dtype)
    runs: dict[str, Run] = {
        method: overlapped(case, domain, choose(method, pass_, domain.device, domain.table))
        for method in settings.methods
    }
    runs |= {"sequence": rivals.sequence, "async_tp": rivals.async_tp, "gemm": rivals.gemm}
    runs |= {"comm": rivals.communication}
    correct = {}
    for name, run in runs.items():
        exact = None if name in ("gemm", "comm") else reference
        problem = world.attempt(partial(try_run, case.name, run, first, decoy, exact))
        if problem is None:
            correct[name] = run
        else:
            results.note(f"{case.name}: {name}: {problem}", failure=name != "async_tp")
    return correct


def rotating(run: Run, sets: list[Operands]) -> Call:
    return lambda index: run(sets[index % len(sets)])


def pass_of(case: Case, world: int, dtype: torch.dtype) -> Pass:
    """What one rank multiplies in a case; a weight gradient gathers by the method of the fprop."""
    if case.op == "ag_gemm":
        fprop = Pass(GATHER, case.m, case.n // world, case.k, dtype, world)
    else:
        fprop = Pass(SCATTER, case.m, case.n, case.k // world, dtype, world)
    return fprop.dgrad if case.pass_ == "dgrad" else fprop


def overlapped(case: Case, domain: OverlapDomain, choice: Choice) -> Run:
    """Our pass, as autograd runs it (linear.py), but with no reduction deferred: alone there is nothing to defer it behind."""
    method, name = choice.method, f"bench/{case.op}/{case.pass_}"
    alone = replace(choice.way, deferred=False)

    def gather(o: Operands) -> torch.Tensor:
        with domain.operator(name, 1, choice.way.in_step):
            return start_all_gather(domain, o.left, method, name, choice.way).matmul(o.right)

    def scatter(o: Operands) -> torch.Tensor:
        with domain.operator(name, 1, choice.way.in_step):
            return start_gemm_reduce_scatter(domain, o.left, o.right, method, name, alone).finish()

    def column_weight(o: Operands) -> torch.Tensor:
        with domain.operator(name, calls=1):
            return into_target(o, o.right, start_all_gather_whole(domain, o.left, method, name).full())

    def row_weight(o: Operands) -> torch.Tensor:
        return into_target(o, o.whole, o.right)

    if case.kind == "weight":
        return column_weight if case.op == "ag_gemm" else row_weight
    return gather if case.kind == "gather" else scatter


def reference_of(case: Case, o: Operands, world: World) -> Reference:
    """The unsharded product that the pass must give on this rank."""
    if case.kind == "scatter":
        return scatter_reference(o.left, o.right, world.group)
    if case.kind == "gather":
        return product_reference(o.whole, o.right)
    return product_reference(*((o.right.t(), o.whole) if case.op == "ag_gemm" else (o.whole.t(), o.right)))


def try_run(name: str, run: Run, inputs: Operands, decoy: Operands, reference: Reference | None) -> None:
    """Run twice on other inputs, so that whatever is left in slots and freed memory is wrong, then check."""
    for _ in range(2):
        run(decoy)
    if inputs.target is not None:
        inputs.target.zero_()
    result = run(inputs)
    check_timeouts()
    if reference is not None:
        check(name, result, reference)


def row(case: Case, method: str, timings: dict[str, Timing], world: int, dtype: torch.dtype) -> dict[str, Any]:
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
