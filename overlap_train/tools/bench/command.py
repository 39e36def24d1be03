"""`overlap-train bench`: what each benchmark is told, which files it writes and of which cases; then measure, plot or record."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ... import OverlapConfig, shutdown
from ...config import METHODS
from ...flags import NETWORKS, Parser, add_options, from_args, option, positive_int
from ...select.method import Method
from ..measure import world
from ..measure.cases import ALL_REDUCES, LAYERS, OPS
from ..measure.models import MODELS
from ..measure.results import Results, hardware
from ..measure.runs import Session, nodes_of
from ..pictures import plots
from . import layers, operators, timeline, turns

SLOW = (
    "bench: no GPU here, so products are in fp32. To try the code on CPU processes, take the model tiny (--shapes tiny "
    "--rows 16, or --layers tiny-mlp --seq 16, or --models tiny --seq 16); large shapes take minutes each"
)
METHODS_HELP = (
    f"of {','.join(METHODS)}; default fused,direct (inside a node),chunked,collective; on the CPU chunked,collective"
)
TABLES_1_2 = ("llama-7b", "llama3-8b", "llama3-70b", "llama3-405b", "qwen2-72b")  # of the Ditron paper
MOST_ASKED = ("llama3-8b-mlp", "llama3-70b-mlp", "llama3-8b-attn", "llama3-70b-attn", "qwen3-32b-mlp")
Contests = Iterator[turns.Contest]


@dataclass(frozen=True)
class Bench:
    """What all benchmarks are told."""

    out: str = option("", "write DIR/operators.json or layers.json, and .md; without it, only print", metavar="DIR")
    methods: tuple[str, ...] = option((), METHODS_HELP, choices=METHODS, metavar="METHOD,...")
    quick: bool = option(False, "fewer and shorter rounds")
    node_ranks = 0  # no option here: nodes as they are found
    network = "auto"
    fp8 = "off"
    graphs = False
    file = "operators"  # NAME.json and NAME.md

    def contests(self, session: Session) -> Contests:
        """All cases. Collective."""
        raise NotImplementedError


@dataclass(frozen=True)
class Operators(Bench):
    """AG+GEMM and GEMM+RS, or GEMM+AR, pass by pass, against NCCL, async-TP and the bound"""

    shapes: tuple[str, ...] = option(TABLES_1_2, "products of their MLPs", choices=tuple(MODELS), metavar="MODEL,...")
    rows: tuple[int, ...] = option((8192,), "of all ranks", parse=positive_int, metavar="M", spaced=True)
    fp8: str = option(
        "off", "operands with one byte an element, against cuBLASLt and NCCL on the same bytes",
        choices=("off", "tensorwise", "blockwise"),
    )  # fmt: skip
    all_reduce: bool = option(False, "instead, those without sequence parallelism (GEMM+AR); any number of rows")
    graphs: bool = option(False, "each burst of calls is one CUDA graph, on all sides: no host time is timed (GPUs)")

    def __post_init__(self) -> None:
        if self.fp8 != "off" and self.all_reduce:
            raise ValueError("--fp8 with --all-reduce: GEMM + AR has no form in fp8; leave one of them out")

    def contests(self, session: Session) -> Contests:
        ops = ALL_REDUCES if self.all_reduce else OPS
        return operators.contests(operators.cases(self.shapes, self.rows, session.world.size, ops), session)


@dataclass(frozen=True)
class Layers(Bench):
    """forward and backward of one column and one row linear"""

    layers: tuple[str, ...] = option(MOST_ASKED, "MODEL-mlp or MODEL-attn", choices=tuple(LAYERS), metavar="LAYER,...")
    seq: tuple[int, ...] = option((8192,), "sequence lengths", parse=positive_int, metavar="S", spaced=True)
    file = "layers"

    def contests(self, session: Session) -> Contests:
        return layers.contests(self.layers, self.seq, session)


@dataclass(frozen=True)
class Ulysses(Bench):
    """GEMM+A2A and A2A+GEMM, pass by pass, against NCCL and the bound"""

    models: tuple[str, ...] = option(
        ("llama3-8b", "llama3-70b"), "whose projections", choices=tuple(MODELS), metavar="MODEL,..."
    )
    seq: tuple[int, ...] = option((8192, 32768, 131072), "tokens in all", parse=positive_int, metavar="S", spaced=True)

    def contests(self, session: Session) -> Contests:
        return operators.contests(operators.exchange_cases(self.models, self.seq, session.world.size), session)


@dataclass(frozen=True)
class Hierarchical(Bench):
    """all operators across nodes, for products shorter and longer than the network takes"""

    node_ranks: int = option(1, "ranks of each node; all nodes may be this machine", parse=positive_int, metavar="L")
    network: str = option("auto", "what carries data between nodes of GPUs", choices=NETWORKS)

    def contests(self, session: Session) -> Contests:
        return operators.contests(operators.hierarchical_cases(session, self.node_ranks), session)


BENCHES = {"operators": Operators, "layers": Layers, "ulysses": Ulysses, "hierarchical": Hierarchical}


def main(arguments: list[str]) -> int:
    """Run the command. Exit status: 0, 1 if one of our methods failed or was wrong.

    Raises:
        ValueError: wrong arguments.
    """
    start = (
        f"Measure:\n\n    {world.START} bench operators --out FOLDER\n\nDraw:\n\n    overlap-train bench plot FOLDER"
    )
    parser = Parser(prog="overlap-train bench", description=start)
    names = (*BENCHES, "timeline", "plot")
    commands: Any = parser.add_subparsers(dest="command", required=True, metavar="|".join(names))
    for name, options in BENCHES.items():
        add_options(commands.add_parser(name, help=options.__doc__), options)
    recorder = commands.add_parser("timeline", help="record kernels and copies of one call of each method, on GPUs")
    recorder.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="write DIR/timeline.json, for plot")
    plot = commands.add_parser("plot", help="draw the results of a folder (needs matplotlib)")
    plot.add_argument("folder", type=Path)
    args = parser.parse_args(arguments)
    if args.command == "plot":
        print(*plots.draw(args.folder), sep="\n")
        return 0
    if args.command == "timeline":
        failed = False
        timeline.record(args.out)
    else:
        failed = measure(args.command, from_args(BENCHES[args.command](), args))
    shutdown()  # not after an error: it needs all ranks
    dist.destroy_process_group()
    return 1 if failed else 0


def measure(name: str, bench: Bench) -> bool:
    """Join the ranks, measure, write and print; returns whether one of our methods failed or was wrong. name: the subcommand.

    Raises:
        ValueError: a method cannot run on these ranks; there are no GPUs to capture graphs on; --out cannot be written.
    """
    if bench.graphs and not torch.cuda.is_available():
        raise ValueError("--graphs: CUDA graphs need GPUs, and this process sees none; leave it out")
    if name == "layers":
        # As Megatron-Core needs; read when CUDA starts, below.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if bench.node_ranks:
        world.pretend_nodes(bench.node_ranks)
    here = world.join(f"{world.START} bench {name}")
    if here.device.type == "cpu":
        here.say(SLOW)
    session = session_of(bench, here)
    if problem := here.attempt(partial(session.results.add, [])):  # before minutes of measuring
        raise ValueError(f"--out {bench.out}: rank 0 cannot write there ({problem}); name another folder")
    world.heat(here.device)
    began = time.monotonic()
    with torch.set_grad_enabled(name == "layers"):  # operators are single passes, of which autograd knows nothing
        for contest in bench.contests(session):
            turns.run(contest, session)
            del contest  # its inputs go before those of the next come
    session.results.share_notes(here.group)
    turns.report(session.results, here)
    here.say(f"{bench.file}: {len(session.results.rows)} rows in {time.monotonic() - began:.0f} s")
    return session.results.failed


def session_of(bench: Bench, here: world.World) -> Session:
    """Collective. Raises ValueError where a method cannot run on these ranks."""
    on_gpu = here.device.type == "cuda"
    fits = [method for method in ("fused", "direct") if on_gpu and (not bench.node_ranks or Method(method).crosses)]
    methods = bench.methods or (*fits, "chunked", "collective")
    # symmetric_mib: enough for three slots of 1 GiB, the largest shape with M = 32768
    config = OverlapConfig(
        symmetric_mib=8192, timeout_s=30.0, main_grad="off", node_ranks=bench.node_ranks, network=bench.network
    )
    path = Path(bench.out, f"{bench.file}.json") if bench.out and here.rank == 0 else None
    dtype, results = torch.bfloat16 if on_gpu else torch.float32, Results(path, hardware(here.device, here.size))
    session = Session(methods, dtype, bench.quick, config, here, results, bench.fp8, bench.graphs)
    nodes_of(session, bench.methods)
    return session
