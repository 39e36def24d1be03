"""The one loop of all benchmarks: whatever does a case's work is checked on every rank, then all take turns, and each method of
ours has a row."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from statistics import fmean

import torch

from ...group.registry import check as check_timeouts
from ...group.registry import forget_graphs, graphed
from ..measure.results import Results, Row, markdown, screen
from ..measure.runs import Inputs, Run, Session, problem_of
from ..measure.timing import Call
from ..measure.world import World
from .transformer_engine import USERBUFFERS

TIMED_ONLY = ("gemm", "comm", "gemms")  # baselines that give no result
NEEDED = {*TIMED_ONLY, "sequence"}  # there is no row without those of its case
OTHERS = ("megatron", "async_tp", "te", *USERBUFFERS)  # other programs: what goes wrong in them is only a note


Runs = dict[str, Run]


@dataclass(frozen=True)
class Contest:
    """One case with all that do its work: our methods, and baselines.

    title: in notes. head: what names it in the record. flops: of one rank. columns: the baselines of each row.
    """

    title: str
    head: Row
    flops: float
    inputs: Inputs
    ours: Runs
    baselines: Runs
    columns: tuple[str, ...]


def run(contest: Contest, session: Session) -> None:
    """Check all, time those that give the right result on every rank, and save a row for each method of ours. Collective."""
    calls = dict[str, Call]()
    for name, work in (contest.ours | contest.baselines).items():
        check = None if name in TIMED_ONLY else contest.inputs.check
        problem, call = problem_of(name, work, contest.inputs, session.world, check), contest.inputs.call(work)
        if problem is None and session.graphs:
            replay, problem = session.world.result_of(partial(replays, name, work, contest, session))
            call = replay or call
        if problem is None:
            calls[name] = call
        else:
            note(f"{contest.title}: {name}: {problem}", session, failure=name not in OTHERS)
    timings = session.time(calls, contest.flops) if calls.keys() >= NEEDED & contest.baselines.keys() else {}
    if session.graphs:
        calls.clear()
        forget_graphs(session.world.group)  # the next case may need more memory
    if not timings:
        return
    ms = {name: timing.ms for name, timing in timings.items()}
    if userbuffers := [ms[name] for name in USERBUFFERS if name in ms]:
        ms["te_userbuffers"] = min(userbuffers)
    columns = {f"{name}_ms": ms.get(name) for name in contest.columns}
    if "comm" in ms:
        columns["bound"] = ms["sequence"] / max(ms["gemm"], ms["comm"])
    ours = [name for name in contest.ours if name in timings]
    session.world.say(f"{contest.title}: " + ", ".join(f"{name} {ms[name]:.3f} ms" for name in ours))
    of_methods = [{"method": name, "ms": ms[name], "host_us": timings[name].host_us} for name in ours]
    session.results.add([contest.head | of_method | columns for of_method in of_methods])


def replays(name: str, work: Run, contest: Contest, session: Session) -> Call:
    """A burst of calls as one CUDA graph, which every burst's first call replays: no host time is in the figure. Collective.

    Raises:
        WrongResult: what the graph computes is wrong.
    """
    burst, call, graph = session.pace(contest.flops).burst, contest.inputs.call(work), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # thread_local: NCCL's watchdog goes on calling CUDA
    with (
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
        graphed(session.world.group) if name in contest.ours else nullcontext(),
    ):
        first = call(0)
        for index in range(1, burst):
            call(index)
    graph.replay()
    torch.cuda.synchronize()
    check_timeouts()
    if name not in TIMED_ONLY:
        contest.inputs.check(name, first)
    return lambda index: graph.replay() if index % burst == 0 else None


def note(text: str, session: Session, failure: bool) -> None:
    """Keep a note. A failure is said at once: a run may be stopped before its table."""
    session.results.note(text, failure)
    if failure:
        session.world.say(session.results.notes[-1])


HIDDEN = ("world", "dtype", "fp8", "nodes", "emulated", "graphs")  # the same in all rows
RATIOS = {  # heading: what is divided by what
    "speed-up": ("sequence_ms", "ms"),
    "speed-up/bound": ("sequence_ms", "bound_ms"),
    "vs Megatron-Core": ("megatron_ms", "ms"),
    "vs async-TP": ("async_tp_ms", "ms"),
    "vs TE userbuffers": ("te_userbuffers_ms", "ms"),
    "over GEMMs": ("ms", "gemms_ms"),
}


def shown(row: Row) -> Row:
    """What the table says of a row: what it holds, by its key without `_ms`, and ratios."""
    known = row | ({"bound_ms": row["bound"] * row["ms"]} if "bound" in row else {})
    pairs = {heading: (known.get(above), known.get(below)) for heading, (above, below) in RATIOS.items()}
    held = {key.removesuffix("_ms"): value for key, value in row.items() if key not in HIDDEN}
    return held | {heading: above / below if above and below else None for heading, (above, below) in pairs.items()}


def of_the_bound(rows: list[Row]) -> str:
    """What part of the bound each method reaches: "fused 0.953 (0.901)", mean and least of its rows. Empty without a bound."""
    reached: dict[str, list[float]] = {}
    for row in rows:
        if (part := row["speed-up/bound"]) is not None:
            reached.setdefault(row["method"], []).append(part)
    return ", ".join(f"{name} {fmean(parts):.3f} ({min(parts):.3f})" for name, parts in reached.items())


def report(results: Results, world: World) -> None:
    """Write the Markdown beside the JSON and print the table, without columns that are empty; on rank 0."""
    if world.rank == 0:
        rows = [shown(row) for row in results.rows]
        keys = dict.fromkeys(key for row in rows for key, value in row.items() if value is not None)
        columns = [(key, itemgetter(key)) for key in keys]
        parts = of_the_bound(rows)
        notes = [*results.notes, *([f"of the bound, mean (least): {parts}"] if parts else [])]
        if results.path is not None:
            results.path.with_suffix(".md").write_text(markdown(rows, notes, columns))
        print(screen(rows, notes, columns), flush=True)
