"""`overlap-train bench`: operators, layers, plot, timeline."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ... import OverlapConfig, shutdown
from ...config import METHODS
from ...flags import PROVIDERS, Parser, add_options, from_args, option, positive_int
from ..measure import world
from ..measure.cases import OPS, PASSES
from ..measure.models import MODELS, TINY
from ..measure.results import Results, hardware, markdown, screen
from ..measure.runs import Session, Settings
from . import attention_blocks, hierarchical, layers, operators, output, plots, timeline
from .shapes import LAYERS, PUBLISHED, TABLES_1_2, WEIGHTS, cases, exchange_cases, layer_cases


@dataclass(frozen=True)
class Bench:
    """What both benchmarks are told."""

    out: str = option("", "write DIR/operators.json or layers.json, and .md", metavar="DIR")
    methods: tuple[str, ...] = option(
        (),
        f"of {','.join(METHODS)}; default fused,direct,chunked,collective; on the CPU chunked,collective",
        choices=METHODS,
        metavar="METHOD,...",
    )
    provider: str = option("auto", "symmetric memory", choices=PROVIDERS)
    quick: bool = option(False, "fewer and shorter rounds")
    tiny: bool = option(False, "one tiny shape in fp32, to try the code on CPU processes")
    connections: int | None = option(
        None, "CUDA_DEVICE_MAX_CONNECTIONS; default: left as it is", parse=positive_int, metavar="N"
    )


@dataclass(frozen=True)
class Operators(Bench):
    """`bench operators`"""

    shapes: tuple[str, ...] = option(
        TABLES_1_2,
        "models, for a product of their MLPs; MODEL-qkv, MODEL-proj; or all",
        choices=(*WEIGHTS, "all"),
        metavar="MODEL,...",
    )
    ops: tuple[str, ...] = option(OPS, f"of {','.join(OPS)}", choices=OPS, metavar="OP,...")
    passes: tuple[str, ...] = option(("fprop", "dgrad"), f"of {','.join(PASSES)}", choices=PASSES, metavar="PASS,...")
    rows: tuple[int, ...] = option((), "global rows; default 8192", parse=positive_int, metavar="M", spaced=True)


@dataclass(frozen=True)
class Layers(Bench):
    """`bench layers`"""

    layers: tuple[str, ...] = option(
        (), "MODEL-mlp or MODEL-attn; default: those of the table of goals", choices=tuple(LAYERS), metavar="LAYER,..."
    )
    seq: tuple[int, ...] = option(
        (), "sequence lengths; default 8192, and 4096 for llama3-8b-mlp", parse=positive_int, metavar="S", spaced=True
    )
    connections: int | None = option(
        1, "CUDA_DEVICE_MAX_CONNECTIONS; Megatron-Core needs 1", parse=positive_int, metavar="N"
    )


@dataclass(frozen=True)
class Ulysses(Bench):
    """`bench ulysses`"""

    what: tuple[str, ...] = option(
        ("operators", "blocks"),
        "projections alone, whole attention blocks",
        choices=("operators", "blocks"),
        metavar="WHAT,...",
    )
    models: tuple[str, ...] = option(
        ("table6", "llama3-8b", "llama3-70b"),
        "models, and table6 for the shapes of Ditron's Table 6",
        choices=("table6", *PUBLISHED),
        metavar="MODEL,...",
    )
    seq: tuple[int, ...] = option((8192, 32768, 131072), "tokens in all", parse=positive_int, metavar="S", spaced=True)
    passes: tuple[str, ...] = option(("fprop", "dgrad"), f"of {','.join(PASSES)}", choices=PASSES, metavar="PASS,...")


@dataclass(frozen=True)
class Hierarchical(Bench):
    """`bench hierarchical`"""

    node_ranks: int = option(
        1, "ranks of each node, all of this machine or of several", parse=positive_int, metavar="L"
    )
    passes: tuple[str, ...] = option(("fprop", "dgrad"), f"of {','.join(PASSES)}", choices=PASSES, metavar="PASS,...")


@dataclass(frozen=True)
class Timeline:
    """`bench timeline`"""

    out: str = option(".", "write DIR/timeline.json, for plot to draw", metavar="DIR")
    what: str = option(
        "linears",
        "both linears of an MLP of Llama-3 8B, a Ulysses attention block of it, or both linears of a wider MLP across nodes",
        choices=tuple(timeline.WHAT),
    )


KINDS = {"operators": Operators, "layers": Layers, "ulysses": Ulysses, "hierarchical": Hierarchical}


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
        recording = from_args(Timeline(), args)
        if recording.what == "nodes":
            hierarchical.pretend_nodes(1)
        timeline.record(Path(recording.out), recording.what, world.join())
        return 0
    return benchmark(from_args(KINDS[args.command](), args))


def parser() -> argparse.ArgumentParser:
    """Of all subcommands."""
    start = f"Measure under torchrun: {world.START} bench operators. Draw without it: overlap-train bench plot FOLDER"
    top = Parser(prog="overlap-train bench", description=start)
    names = "|".join((*KINDS, "timeline", "plot"))
    commands: Any = top.add_subparsers(dest="command", required=True, metavar=names)
    helps = {
        "operators": "AG+GEMM and GEMM+RS, pass by pass, against NCCL, async-TP and the bound",
        "layers": "forward and backward of one column and one row linear",
        "hierarchical": "AG+GEMM and GEMM+RS across nodes, for products shorter and longer than the network takes",
        "ulysses": "GEMM+A2A and A2A+GEMM, and whole attention blocks, against NCCL",
    }
    for name, settings in KINDS.items():
        add_options(commands.add_parser(name, help=helps[name]), settings)
    plot = commands.add_parser("plot", help="draw the results of a folder (needs matplotlib)")
    plot.add_argument("folder", type=Path)
    told = "record kernels and copies of one call of each method, on GPUs"
    add_options(commands.add_parser("timeline", help=told), Timeline)
    return top


def benchmark(bench: Bench) -> int:
    """Join the ranks, measure, write and print."""
    if bench.connections:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(bench.connections)  # read when CUDA starts, which is below
    if isinstance(bench, Hierarchical):
        hierarchical.pretend_nodes(bench.node_ranks)
    here = world.join()
    world.heat(here.device, 0.5)
    failed = [_one(bench, name, columns, here) for name, columns in _files(bench)]
    shutdown()  # not after an error: it needs all ranks
    dist.destroy_process_group()
    return 1 if any(failed) else 0


def _files(bench: Bench) -> list[tuple[str, output.Columns]]:
    """What is written, and the columns of its table."""
    if isinstance(bench, Operators):
        return [("operators", output.OPERATOR_COLUMNS)]
    if isinstance(bench, Ulysses):
        columns = {"operators": output.EXCHANGE_COLUMNS, "blocks": output.BLOCK_COLUMNS}
        return [("layers" if what == "blocks" else what, columns[what]) for what in bench.what]
    if isinstance(bench, Hierarchical):
        return [("hierarchical", output.HIERARCHICAL_COLUMNS)]
    return [("layers", output.LAYER_COLUMNS)]


def _one(bench: Bench, name: str, columns: output.Columns, here: world.World) -> bool:
    """Measure, write and print one of the files; returns whether one of our methods failed or was wrong."""
    began, path = time.monotonic(), Path(bench.out, f"{name}.json") if bench.out and here.rank == 0 else None
    session = Session(settings_of(bench, here.device), here, Results(path, hardware(here.device, here.size)))
    measure(bench, name, session)
    session.results.share_notes(here.group)
    report(session.results, columns, here)
    here.say(f"{name}: {len(session.results.rows)} rows in {time.monotonic() - began:.0f} s")
    return session.results.failed


def measure(bench: Bench, name: str, session: Session) -> None:
    """All shapes that were asked for. Collective."""
    here = session.world
    if isinstance(bench, Ulysses):
        _measure_ulysses(bench, name, session)
    elif isinstance(bench, Hierarchical):
        operators.run(hierarchical.hierarchical_cases(session, bench.passes, bench.tiny), session)
    elif isinstance(bench, Layers):
        names, sequences = ([f"{TINY}-mlp"], [16]) if bench.tiny else (bench.layers, bench.seq)
        layers.run(layer_cases(names, sequences, here.size), session)
    elif isinstance(bench, Operators):
        models, m = ((TINY,), 16) if bench.tiny else (bench.shapes, 8192)
        operators.run(cases(models, bench.ops, bench.passes, bench.rows or (m,), here.size), session)


def _measure_ulysses(bench: Ulysses, name: str, session: Session) -> None:
    models, tokens = ((TINY,), (16,)) if bench.tiny else (bench.models, bench.seq)
    if name == "operators":
        operators.run(exchange_cases(models, tokens, bench.passes, session.world.size), session)
    else:
        chosen = [(model, MODELS[model]) for model in models if model != "table6"]
        attention_blocks.run(chosen, tokens, session)


def settings_of(bench: Bench, device: torch.device) -> Settings:
    """What the measurements themselves need."""
    node_ranks = bench.node_ranks if isinstance(bench, Hierarchical) else 0
    in_node = ("fused", "direct") if device.type == "cuda" and not node_ranks else ()
    methods = bench.methods or (*in_node, "chunked", "collective")
    dtype = torch.float32 if bench.tiny else torch.bfloat16
    # symmetric_mib: enough for three slots of 1 GiB, the largest shape with M = 32768
    config = OverlapConfig(
        provider=bench.provider, symmetric_mib=8192, timeout_s=30.0, main_grad="off", node_ranks=node_ranks
    )
    return Settings(methods, dtype, bench.quick, config)


def report(results: Results, columns: output.Columns, here: world.World) -> None:
    """Write the Markdown beside the JSON and print the table; on rank 0."""
    if here.rank != 0:
        return
    of_operators = columns in (output.OPERATOR_COLUMNS, output.EXCHANGE_COLUMNS, output.HIERARCHICAL_COLUMNS)
    summary = output.summary(results.rows) if of_operators else []
    if results.path is not None:
        results.path.with_suffix(".md").write_text(markdown(results.rows, results.notes, columns, summary))
    print(screen(results.rows, results.notes, columns, summary), flush=True)
