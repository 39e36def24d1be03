"""The one loop of all benchmarks: whatever does a case's work is checked on every rank, then all take turns, and each method of
ours has a row."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from ..measure.results import Results, Row, markdown, plain, screen
from ..measure.runs import Inputs, Run, Session, problem_of
from ..measure.timing import Call
from ..measure.world import World
from . import transformer_engine

TIMED_ONLY = ("gemm", "comm", "gemms")  # baselines that give no result
NEEDED = {*TIMED_ONLY, "sequence"}  # there is no row without those of its case
RIVALS = (
    "megatron",
    "async_tp",
    "te",
    *transformer_engine.USERBUFFERS,
)  # other programs: what goes wrong in them is only a note


@dataclass(frozen=True)
class Way:
    """One way to do the work. method: of ours, as its row names it; told: what its row adds."""

    run: Run
    method: str = ""
    told: Row = field(default_factory=dict)


Ways = dict[str, Way]


@dataclass(frozen=True)
class Contest:
    """One case with all that do its work.

    title: in notes. head: what names it in the record. flops: of one rank. columns: the baselines of each row. te: what makes
    TransformerEngine's ways, if it has the work.
    """

    title: str
    head: Row
    flops: float
    inputs: Inputs
    ways: Ways
    columns: tuple[str, ...]
    te: Callable[[Any], AbstractContextManager[Ways]] | None = None


def run(contest: Contest, session: Session) -> None:
    """Check and time all; the rows are saved. TransformerEngine, which may hang, takes part in a second run. Collective."""
    calls = correct(contest, contest.ways, session)
    if not calls.keys() >= NEEDED & contest.ways.keys():
        return
    began = time.monotonic()
    rows = take_turns(contest, calls, session)
    session.results.add(rows)
    took = time.monotonic() - began
    if rows and contest.te and (te := transformer_engine.load(session)):
        with transformer_engine.limited(took), contest.te(te) as others:
            calls |= correct(contest, others, session)
            session.results.revise(take_turns(contest, calls, session))


def correct(contest: Contest, ways: Ways, session: Session) -> dict[str, Call]:
    """The calls of those that give the right result on every rank; notes about the others. Collective."""
    found = {}
    for name, way in ways.items():
        check = None if name in TIMED_ONLY else contest.inputs.check
        problem = problem_of(name, way.run, contest.inputs, session.world, check)
        if problem is None:
            found[name] = contest.inputs.call(way.run)
        else:
            note(f"{contest.title}: {name}: {problem}", session, failure=name not in RIVALS)
    return found


def note(text: str, session: Session, failure: bool) -> None:
    """Keep a note. A failure is said at once: a run may be stopped before its table."""
    session.results.note(text, failure)
    if failure:
        session.world.say(session.results.notes[-1])


def take_turns(contest: Contest, calls: Mapping[str, Call], session: Session) -> list[Row]:
    """Time all calls; a row for each method of ours."""
    timings = session.time(calls, contest.flops)
    ms: dict[str, float | None] = {name: timing.ms for name, timing in timings.items()}
    userbuffers = [timings[name].ms for name in transformer_engine.USERBUFFERS if name in timings]
    ms["te_userbuffers"] = min(userbuffers, default=None)
    baselines = {f"{name}_ms": ms.get(name) for name in contest.columns}
    if "comm" in timings:
        baselines["bound"] = timings["sequence"].ms / max(timings["gemm"].ms, timings["comm"].ms)
    ours = {name: way for name, way in contest.ways.items() if way.method and name in timings}
    session.world.say(f"{contest.title}: " + ", ".join(f"{name} {timings[name].ms:.3f} ms" for name in ours))
    return [
        contest.head
        | {"method": way.method, "ms": timings[name].ms, "host_us": timings[name].host_us}
        | baselines
        | way.told
        for name, way in ours.items()
    ]


HIDDEN = ("world", "dtype", "nodes", "emulated")  # the same in all rows
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
    return held | {heading: above / below for heading, (above, below) in pairs.items() if above and below}


def report(results: Results, world: World) -> None:
    """Write the Markdown beside the JSON and print the table, without columns that are empty; on rank 0."""
    if world.rank == 0:
        rows = [shown(row) for row in results.rows]
        columns = plain({key: key for row in rows for key, value in row.items() if value is not None})
        if results.path is not None:
            results.path.with_suffix(".md").write_text(markdown(rows, results.notes, columns))
        print(screen(rows, results.notes, columns), flush=True)
