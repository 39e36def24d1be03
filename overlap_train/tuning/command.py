"""`overlap-train tune`: measure which method is fastest for the linears of a model, and keep the winners for `auto`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .. import OverlapConfig, shutdown
from ..bench import world
from ..bench.operators import open_domain, pass_of
from ..bench.output import Results, collect_notes, screen
from ..bench.settings import Settings
from ..bench.shapes import Case
from ..methods import TRAITS
from ..one_line import Parser
from ..operators.portable import why_not
from ..tuned.passes import Pass
from ..tuned.table import Key, Winner, key_of, save
from ..tuned.ways import PLAIN, WAYS
from .cases import MODELS, Sizes, model_cases, one_a_bucket, weight_cases
from .measure import tune_case

CANDIDATES = tuple(TRAITS)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Row = dict[str, Any]


def main(argv: list[str]) -> int:
    """Measure and store. Exit status: 0, 1 if no method worked for some shape, 2 for wrong arguments."""
    try:
        args = parser().parse_args(argv)
        ranks = ranks_of(args.tp, args.dry_run)
        cases = cases_from(args, ranks)
        if args.dry_run:
            print(screen([shape_row(case, ranks) for case in cases], [], SHAPE_COLUMNS))
            return 0
        return tune(args, cases)
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"overlap-train tune: error: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """Of `overlap-train tune`."""
    top = Parser(
        prog="overlap-train tune",
        description="Under torchrun: torchrun --nproc-per-node 4 -m overlap_train tune --model llama3-8b --seq 8192",
    )
    top.add_argument("--model", choices=MODELS, help="whose linears: qkv, proj, fc1 and fc2")
    for kind in ("column", "row"):
        meaning = (
            f"{kind}-parallel linears by their whole weights [N, K]: the output layer, or a model that is not listed"
        )
        top.add_argument(f"--{kind}", type=_sizes, nargs="+", default=[], metavar="N,K", help=meaning)
    top.add_argument(
        "--tp", type=_positive, default=None, help="tensor-parallel ranks; default all that torchrun starts"
    )
    top.add_argument("--seq", type=_positive, nargs="+", required=True, metavar="TOKENS", help="sequence lengths")
    top.add_argument("--micro-batch", type=_positive, default=1, metavar="N", help="sequences a call holds, default 1")
    top.add_argument(
        "--methods",
        type=_methods,
        default=None,
        metavar="METHOD,...",
        help="candidates; default fused,direct,chunked,collective; on the CPU chunked,collective. The untuned default and "
        "collective are always among them",
    )
    top.add_argument("--dtype", choices=tuple(DTYPES), default=None, help="default bf16; on the CPU fp32")
    top.add_argument("--provider", default="auto", help="symmetric memory: auto, nvshmem, torch or host")
    top.add_argument("--tuning-dir", default=OverlapConfig().tuning_dir, metavar="DIR", help="default %(default)s")
    top.add_argument(
        "--connections",
        type=_positive,
        default=1,
        metavar="N",
        help="CUDA_DEVICE_MAX_CONNECTIONS while measuring; default 1, which Megatron-Core trains with",
    )
    top.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    top.add_argument("--dry-run", action="store_true", help="only print the shapes; needs no torchrun")
    return top


def ranks_of(asked: int | None, dry_run: bool) -> int:
    """How many ranks share a linear. Raises ValueError where that is not what torchrun has started."""
    started = os.environ.get("WORLD_SIZE")
    if dry_run and (asked or started):
        return asked or int(started or 0)
    if started is None or "RANK" not in os.environ:
        way = f"torchrun --nproc-per-node {asked or 4} -m overlap_train tune ..."
        raise ValueError(f"--tp: how many ranks? give --tp, or {way}" if dry_run else f"start it under torchrun: {way}")
    if asked not in (None, int(started)):
        raise ValueError(f"--tp {asked}: torchrun has started {started} ranks; start it with --nproc-per-node {asked}")
    return int(started)


def cases_from(args: argparse.Namespace, ranks: int) -> list[Case]:
    """What the arguments ask for. Raises ValueError where that is nothing, or cannot be sharded over the ranks."""
    if not (args.model or args.column or args.row):
        raise ValueError(f"which linears? give --model (one of {', '.join(MODELS)}), --column N,K or --row N,K")
    ms = [seq * args.micro_batch for seq in args.seq]
    cases = model_cases(args.model, ms, ranks) if args.model else []
    return one_a_bucket([*cases, *weight_cases(args.column, args.row, ms, ranks)], ranks)


def tune(args: argparse.Namespace, cases: list[Case]) -> int:
    """Join the ranks, measure, store after each case, and print."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(args.connections)  # read when CUDA starts, which is in join
    began, here = time.monotonic(), world.join()
    settings, key = settings_of(args, here.device), key_of(here.device, here.size)
    keep(args.tuning_dir, key, None, here)  # a folder that cannot be written is said before minutes of measuring
    domain, results = open_domain(cases, settings, here), Results()
    world.heat(here.device, 0.5)
    for number, case in enumerate(cases):
        winner = tune_case(case, settings, domain, here, results)
        if winner is not None:
            keep(args.tuning_dir, key, winner, here)
            results.rows.append(shape_row(case, here.size) | figures(winner))
        shape = " ".join(shape_row(case, here.size).values())
        here.say(f"[{number + 1}/{len(cases)}] {shape}: {winner.method if winner else 'no method works'}")
    collect_notes(results, here.group)
    here.say(screen(results.rows, results.notes, columns_of(results.rows)))
    here.say(
        f"tune: {len(results.rows)} winners in {args.tuning_dir}/{key.file_name}, {time.monotonic() - began:.0f} s"
    )
    shutdown()
    dist.destroy_process_group()
    return 1 if results.failed else 0


def settings_of(args: argparse.Namespace, device: torch.device) -> Settings:
    """As the benchmark has them."""
    on_gpu = device.type == "cuda"
    dtype = DTYPES[args.dtype or ("bf16" if on_gpu else "fp32")]
    methods = args.methods or (CANDIDATES if on_gpu else ("chunked", "collective"))
    for problem in filter(None, (why_not(method, device) for method in methods)):
        raise ValueError(problem)
    limits = OverlapConfig(symmetric_mib=8192, timeout_s=30.0, main_grad="off")
    config = replace(limits, provider=args.provider, tuning_dir=args.tuning_dir)
    return Settings(tuple(methods), dtype, args.quick, config)


def keep(folder: str, key: Key, winner: Winner | None, here: world.World) -> None:
    """Store on rank 0. Raises ValueError on every rank if that fails."""
    work = partial(save, folder, key, [] if winner is None else [winner]) if here.rank == 0 else lambda: None
    problem = here.attempt(work)
    if problem is not None:
        raise ValueError(f"--tuning-dir {folder}: rank 0 cannot write there ({problem}); name another folder")


def shape_row(case: Case, ranks: int) -> Row:
    """One line of the printed table; sizes are those of one rank's product, M those of all ranks."""
    pass_: Pass = pass_of(case, ranks, torch.float32)
    return {"linear": case.model, "pass": case.pass_, "kind": pass_.kind, "sizes": f"{pass_.m}, {pass_.n}, {pass_.k}"}


def figures(winner: Winner) -> Row:
    """gain: how much faster than collective."""
    collective = winner.ms.get("collective")
    name = (winner.way_of(winner.method) or PLAIN).named(winner.method)
    gain = None if collective is None else f"{100 * (collective / winner.ms[name] - 1):+.1f} %"
    return {"ms": winner.ms, "winner": name, "gain": gain}


SHAPE_COLUMNS = (
    ("linear", lambda row: row["linear"]),
    ("pass", lambda row: row["pass"]),
    ("kind", lambda row: row["kind"]),
    ("M, N, K", lambda row: row["sizes"]),
)


def columns_of(rows: list[Row]) -> tuple[Any, ...]:
    """The shape, the milliseconds of each method that ran anywhere, the winner and its gain."""
    possible = [way.named(method) for method in CANDIDATES for way in WAYS]
    names = [name for name in possible if any(name in row["ms"] for row in rows)]
    times = [(f"{name} ms", lambda row, name=name: row["ms"].get(name)) for name in names]
    ends = [("winner", lambda row: row["winner"]), ("over collective", lambda row: row["gain"])]
    return (*SHAPE_COLUMNS, *times, *ends)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _sizes(text: str) -> Sizes:
    found = re.fullmatch(r"([1-9][0-9]*),([1-9][0-9]*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not N,K: the sizes of a weight, such as 128256,4096")
    return int(found[1]), int(found[2])


def _methods(text: str) -> list[str]:
    words = [word for word in text.split(",") if word]
    wrong = [word for word in words if word not in CANDIDATES]
    if wrong or not words:
        raise argparse.ArgumentTypeError(f"{wrong[0] if wrong else text!r} is not one of {', '.join(CANDIDATES)}")
    return words
