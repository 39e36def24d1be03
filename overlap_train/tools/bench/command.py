"""`overlap-train bench`: operators, layers, plot, timeline."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ... import shutdown
from ...flags import Parser, add_options, from_args, option, positive_int, shown
from ..measure import world
from ..measure.pretended import pretend_nodes
from ..measure.results import Results, hardware, markdown, screen
from ..measure.runs import Session
from . import output, plots, timeline
from .kinds import KINDS, Bench, File

SLOW = "bench: no GPU here. On CPU processes sizes like these take a minute or more a row; --tiny only tries the code, in seconds"


@dataclass(frozen=True)
class Timeline:
    """`bench timeline`"""

    out: str = option(".", "write DIR/timeline.json, for plot to draw", metavar="DIR")
    what: str = option(
        "linears",
        "both linears of an MLP of Llama-3 8B, a Ulysses attention block of it, or both linears of a wider MLP across nodes",
        choices=timeline.WHAT,
    )
    node_ranks: int | None = option(
        None, "with --what nodes: ranks of each node; default 1", parse=positive_int, metavar="L"
    )


def main(arguments: list[str]) -> int:
    """Run the command. Exit status: 0, 1 if one of our methods failed or was wrong.

    Raises:
        ValueError: wrong arguments.
    """
    args = parser().parse_args(arguments)
    if args.command == "plot":
        print(*plots.draw(args.folder), sep="\n")
        return 0
    if args.command == "timeline":
        return _record(from_args(Timeline(), args))
    return benchmark(args.command, from_args(KINDS[args.command](), args))


def _start(name: str) -> str:
    """How to start a subcommand."""
    return f"{world.START} bench {name}"


def _record(told: Timeline) -> int:
    """Record a timeline."""
    node_ranks = told.node_ranks or 1
    if told.what == timeline.NODES:
        pretend_nodes(node_ranks)
    elif told.node_ranks:
        raise ValueError(
            f"{shown(told, 'node_ranks')} with {shown(told, 'what')}: only --what nodes has nodes; leave it out"
        )
    timeline.record(Path(told.out), told.what, node_ranks, world.join(_start("timeline")))
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of `overlap-train bench` with all its subcommands."""
    start = f"Measure:\n\n    {_start('operators')} --out FOLDER\n\nDraw:\n\n    overlap-train bench plot FOLDER"
    top = Parser(prog="overlap-train bench", description=start)
    names = "|".join((*KINDS, "timeline", "plot"))
    commands: Any = top.add_subparsers(dest="command", required=True, metavar=names)
    helps = {
        "operators": "AG+GEMM and GEMM+RS, pass by pass, against NCCL, async-TP and the bound",
        "layers": "forward and backward of one column and one row linear",
        "hierarchical": "all operators across nodes, for products shorter and longer than the network takes",
        "ulysses": "GEMM+A2A and A2A+GEMM, and whole attention blocks, against NCCL",
    }
    for name, settings in KINDS.items():
        add_options(commands.add_parser(name, help=helps[name]), settings)
    told = "record kernels and copies of one call of each method, on GPUs"
    add_options(commands.add_parser("timeline", help=told), Timeline)
    plot = commands.add_parser("plot", help="draw the results of a folder (needs matplotlib)")
    plot.add_argument("folder", type=Path)
    return top


def benchmark(name: str, bench: Bench) -> int:
    """Join the ranks, measure, write and print. name: the subcommand."""
    if bench.connections:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(bench.connections)  # read when CUDA starts, which is below
    if bench.node_ranks:
        pretend_nodes(bench.node_ranks)
    here = world.join(_start(name))
    if here.device.type == "cpu" and not bench.tiny:
        here.say(SLOW)
    world.heat(here.device)
    failed = [_one(bench, file, here) for file in bench.files()]
    shutdown()  # not after an error: it needs all ranks
    dist.destroy_process_group()
    return 1 if any(failed) else 0


def _one(bench: Bench, file: File, here: world.World) -> bool:
    """Measure, write and print one of the files; returns whether one of our methods failed or was wrong."""
    began, path = time.monotonic(), Path(bench.out, f"{file.name}.json") if bench.out and here.rank == 0 else None
    session = Session(bench.settings(here.device), here, Results(path, hardware(here.device, here.size)))
    file.measure(session)
    session.results.share_notes(here.group)
    report(session.results, file.columns, here)
    here.say(f"{file.name}: {len(session.results.rows)} rows in {time.monotonic() - began:.0f} s")
    return session.results.failed


def report(results: Results, columns: output.Columns, here: world.World) -> None:
    """Write the Markdown beside the JSON and print the table; on rank 0."""
    if here.rank != 0:
        return
    summary = output.summary(results.rows)
    if results.path is not None:
        results.path.with_suffix(".md").write_text(markdown(results.rows, results.notes, columns, summary))
    print(screen(results.rows, results.notes, columns, summary), flush=True)
