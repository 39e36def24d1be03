"""`overlap-train bench`: what each benchmark is told, which files it writes and of which cases; then measure, plot or record."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ... import OverlapConfig, shutdown
from ...config import METHODS
from ...flags import NETWORKS, PROVIDERS, Parser, add_options, from_args, option, positive_float, positive_int, shown
from ...select.method import Method
from ..measure import world
from ..measure.cases import EXCHANGES, LAYERS, OPS, PASSES, PUBLISHED, WEIGHTS
from ..measure.models import TINY
from ..measure.results import Results, hardware
from ..measure.runs import Session, Settings, nodes_of, refuse_kernels_on_cpus, refuse_methods_of_one_node
from ..pictures import bars
from . import attention, layers, operators, timeline, turns
from .operators import TABLE_6

SLOW = "bench: no GPU here. On CPU processes sizes like these take a minute or more a row; --tiny only tries the code, in seconds"
METHODS_HELP = (
    f"of {','.join(METHODS)}; default fused,direct (inside a node),chunked,collective; on the CPU chunked,collective"
)
SHAPES_HELP = "MODEL: a product of its MLP; MODEL-qkv, MODEL-proj: of its attention; all"
LAYERS_HELP = (
    "MODEL-mlp or MODEL-attn; default: both of llama3-8b (the MLP also with 4096) and llama3-70b, and qwen3-32b-mlp"
)
PARTS = ("operators", "blocks")
ALL_OPS = (*OPS, *EXCHANGES)
TABLES_1_2 = ("llama-7b", "llama3-8b", "llama3-70b", "llama3-405b", "qwen2-72b")  # of the Ditron paper
Contests = Iterator[turns.Contest]


def some(default: tuple[str, ...], choices: tuple[str, ...], metavar: str, help: str = "") -> Any:
    """An option of several of these choices."""
    return option(default, help or f"of {','.join(choices)}", choices=choices, metavar=metavar)


@dataclass(frozen=True)
class Bench:
    """What all benchmarks are told."""

    out: str = option("", "write DIR/operators.json or layers.json, and .md; without it, only print", metavar="DIR")
    methods: tuple[str, ...] = some((), METHODS, "METHOD,...", METHODS_HELP)
    provider: str = option("auto", "what provides symmetric memory", choices=PROVIDERS)
    tuning_dir: str = option(
        OverlapConfig().tuning_dir, "where auto finds winners of overlap-train tune", metavar="DIR"
    )
    quick: bool = option(False, "fewer and shorter rounds")
    rounds: int | None = option(None, "how many; default 5, with --quick 3", parse=positive_int, metavar="N")
    tiny: bool = option(False, "one tiny shape in fp32, to try the code on CPU processes")
    node_ranks = 0  # no option here: nodes as they are found
    network = "auto"
    files = ("operators",)  # NAME.json and NAME.md, in the order in which they are measured

    def contests(self, file: str, session: Session) -> Contests:
        """The cases of a file. Collective."""
        raise NotImplementedError


@dataclass(frozen=True)
class OfPasses(Bench):
    """What all benchmarks of single passes are told."""

    passes: tuple[str, ...] = some(PASSES, PASSES, "PASS,...")


@dataclass(frozen=True)
class Operators(OfPasses):
    """AG+GEMM and GEMM+RS, pass by pass, against NCCL, async-TP and the bound"""

    shapes: tuple[str, ...] = some(TABLES_1_2, (*WEIGHTS, "all"), "MODEL,...", SHAPES_HELP)
    ops: tuple[str, ...] = some(OPS, OPS, "OP,...")
    rows: tuple[int, ...] = option((), "of all ranks; default 8192", parse=positive_int, metavar="M", spaced=True)

    def contests(self, file: str, session: Session) -> Contests:
        models, m = ((TINY,), 16) if self.tiny else (self.shapes, 8192)
        cases = operators.cases(models, self.ops, self.passes, self.rows or (m,), session.world.size)
        return operators.contests(cases, session)


@dataclass(frozen=True)
class Layers(Bench):
    """forward and backward of one column and one row linear"""

    layers: tuple[str, ...] = some((), tuple(LAYERS), "LAYER,...", LAYERS_HELP)
    seq: tuple[int, ...] = option((), "sequence lengths; default 8192", parse=positive_int, metavar="S", spaced=True)
    files = ("layers",)

    def contests(self, file: str, session: Session) -> Contests:
        names, lengths = ((f"{TINY}-mlp",), (16,)) if self.tiny else (self.layers, self.seq)
        return layers.contests(layers.layer_cases(names, lengths, session.world.size), session)


@dataclass(frozen=True)
class Ulysses(OfPasses):
    """GEMM+A2A and A2A+GEMM, and whole attention blocks, against NCCL"""

    what: tuple[str, ...] = some(PARTS, PARTS, "WHAT,...", "projections alone, whole attention blocks")
    models: tuple[str, ...] = some(
        (TABLE_6, "llama3-8b", "llama3-70b"),
        (TABLE_6, *PUBLISHED),
        "MODEL,...",
        "table6: the shapes of Ditron's Table 6",
    )
    seq: tuple[int, ...] = option((8192, 32768, 131072), "tokens in all", parse=positive_int, metavar="S", spaced=True)

    def contests(self, file: str, session: Session) -> Contests:
        models, tokens = ((TINY,), (16,)) if self.tiny else (self.models, self.seq)
        if file == "layers":
            return attention.contests([name for name in models if name != TABLE_6], tokens, session)
        return operators.contests(operators.exchange_cases(models, tokens, self.passes, session.world.size), session)


@dataclass(frozen=True)
class Hierarchical(OfPasses):
    """all operators across nodes, for products shorter and longer than the network takes"""

    ops: tuple[str, ...] = some(ALL_OPS, ALL_OPS, "OP,...")
    ratios: tuple[float, ...] = option(
        operators.RATIOS, "product over network, in time", parse=positive_float, metavar="R,..."
    )
    node_ranks: int = option(1, "ranks of each node; all nodes may be this machine", parse=positive_int, metavar="L")
    network: str = option("auto", "what carries data between nodes of GPUs", choices=NETWORKS)
    network_sms: tuple[int, ...] = option(
        (), "time our methods with so many SMs for NCCL between nodes, too", parse=positive_int, metavar="SMS,..."
    )

    def contests(self, file: str, session: Session) -> Contests:
        refuse_methods_of_one_node(self.methods, nodes_of(session))
        shapes = (self.ops, self.passes, self.ratios, self.node_ranks, self.tiny)
        return operators.contests(operators.hierarchical_cases(session, *shapes), session, self.network_sms)


@dataclass(frozen=True)
class Timeline:
    """record kernels and copies of one call of each method, on GPUs"""

    out: str = option(".", "write DIR/timeline.json, for plot to draw", metavar="DIR")
    what: str = option("linears", "which calls: " + "; ".join(timeline.WHAT.values()), choices=tuple(timeline.WHAT))
    node_ranks: int | None = option(None, "of each node of --what nodes; default 1", parse=positive_int, metavar="L")


BENCHES: dict[str, Any] = {
    "operators": Operators,
    "layers": Layers,
    "ulysses": Ulysses,
    "hierarchical": Hierarchical,
    "timeline": Timeline,
}


def main(arguments: list[str]) -> int:
    """Run the command. Exit status: 0, 1 if one of our methods failed or was wrong.

    Raises:
        ValueError: wrong arguments.
    """
    start = (
        f"Measure:\n\n    {world.START} bench operators --out FOLDER\n\nDraw:\n\n    overlap-train bench plot FOLDER"
    )
    parser = Parser(prog="overlap-train bench", description=start)
    commands: Any = parser.add_subparsers(dest="command", required=True, metavar="|".join((*BENCHES, "plot")))
    for name, options in BENCHES.items():
        add_options(commands.add_parser(name, help=options.__doc__), options)
    plot = commands.add_parser("plot", help="draw the results of a folder (needs matplotlib)")
    plot.add_argument("folder", type=Path)
    args = parser.parse_args(arguments)
    if args.command == "plot":
        print(*bars.draw(args.folder), sep="\n")
        return 0
    told = from_args(BENCHES[args.command](), args)
    return record(told) if isinstance(told, Timeline) else benchmark(args.command, told)


def record(told: Timeline) -> int:
    """Record a timeline. Raises ValueError where there are no GPUs."""
    if told.what == timeline.NODES:
        world.pretend_nodes(told.node_ranks or 1)
    elif told.node_ranks:
        flags = f"{shown(told, 'node_ranks')} with {shown(told, 'what')}"
        raise ValueError(f"{flags}: only --what nodes has nodes; leave it out")
    if not torch.cuda.is_available():
        raise ValueError(
            "bench timeline records GPUs, and this process sees none; to draw a recording: bench plot FOLDER"
        )
    here = world.join(f"{world.START} bench timeline")
    timeline.record(Path(told.out), told.what, told.node_ranks or 1, here)
    return 0


def benchmark(name: str, bench: Bench) -> int:
    """Join the ranks, measure, write and print. name: the subcommand."""
    if name == "layers":
        # As Megatron-Core needs; read when CUDA starts, below.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if bench.node_ranks:
        world.pretend_nodes(bench.node_ranks)
    here = world.join(f"{world.START} bench {name}")
    if here.device.type == "cpu" and not bench.tiny:
        here.say(SLOW)
    world.heat(here.device)
    settings = settings_of(bench, here.device)
    files = ["layers" if what == "blocks" else what for what in getattr(bench, "what", bench.files)]
    failed = [measure(bench, file, settings, here) for file in files]
    shutdown()  # not after an error: it needs all ranks
    dist.destroy_process_group()
    return 1 if any(failed) else 0


def settings_of(bench: Bench, device: torch.device) -> Settings:
    """Raises ValueError for a method that cannot run on the device."""
    fits = [method for method in ("fused", "direct") if not bench.node_ranks or Method(method).crosses]
    methods = bench.methods or (*(fits if device.type == "cuda" else ()), "chunked", "collective")
    refuse_kernels_on_cpus(bench.methods, device)
    # symmetric_mib: enough for three slots of 1 GiB, the largest shape with M = 32768
    config = OverlapConfig(
        provider=bench.provider, symmetric_mib=8192, timeout_s=30.0, main_grad="off", node_ranks=bench.node_ranks,
        tuning_dir=bench.tuning_dir, network=bench.network,
    )  # fmt: skip
    return Settings(methods, torch.float32 if bench.tiny else torch.bfloat16, bench.quick, config, bench.rounds)


def measure(bench: Bench, file: str, settings: Settings, here: world.World) -> bool:
    """Measure, write and print one of the files; returns whether one of our methods failed or was wrong."""
    began, path = time.monotonic(), Path(bench.out, f"{file}.json") if bench.out and here.rank == 0 else None
    session = Session(settings, here, Results(path, hardware(here.device, here.size)))
    session.results.add([])  # a folder that cannot be written is said before minutes of measuring
    with torch.set_grad_enabled(file == "layers"):  # operators are single passes, of which autograd knows nothing
        for contest in bench.contests(file, session):
            turns.run(contest, session)
            del contest  # its inputs go before those of the next come
    session.results.share_notes(here.group)
    turns.report(session.results, here)
    here.say(f"{file}: {len(session.results.rows)} rows in {time.monotonic() - began:.0f} s")
    return session.results.failed
