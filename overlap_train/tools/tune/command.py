"""`overlap-train tune`: measure which method is fastest for the linears of a model, and keep the winners for `auto`."""

from __future__ import annotations

import argparse
import os
import re
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from ... import OverlapConfig, shutdown
from ...config import flag_name
from ...flags import PROVIDERS, Parser, add_options, from_args, option, positive_int, positive_int_or_0
from ...select.cost import reach_of
from ...select.method import NAMES
from ...select.table import Key, Winner, key_of, save
from ..measure import world
from ..measure.cases import Case, cases_of
from ..measure.models import MODELS
from ..measure.results import Columns, Results, Row, plain, screen
from ..measure.runs import Session, Settings, nodes_of, refuse_kernels_on_cpus, refuse_methods_of_one_node
from .candidates import model_cases, one_a_bucket, tune_case

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Sizes = tuple[int, int]


def _sizes(text: str) -> Sizes:
    found = re.fullmatch(r"([1-9][0-9]*),([1-9][0-9]*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not N,K: the sizes of a weight, such as 128256,4096")
    return int(found[1]), int(found[2])


@dataclass(frozen=True)
class Tune:
    """What the tuner is told."""

    model: str | None = option(
        None, f"qkv, proj, fc1 and fc2 of one of {', '.join(MODELS)}", choices=tuple(MODELS), metavar="NAME"
    )
    column: tuple[Sizes, ...] = option(
        (),
        "column-parallel linears by their whole weights [N, K]: the output layer, qkv or fc1 of a model that is not listed",
        parse=_sizes,
        metavar="N,K",
        spaced=True,
    )
    row: tuple[Sizes, ...] = option(
        (),
        "row-parallel linears by their whole weights [N, K]: proj or fc2 of a model that is not listed",
        parse=_sizes,
        metavar="N,K",
        spaced=True,
    )
    ulysses: bool = option(
        False, "measure the QKV and output projections of --model under Ulysses, instead of its linears under TP"
    )
    tp: int | None = option(
        None, "tensor-parallel ranks; default all that torchrun starts", parse=positive_int, metavar="N"
    )
    seq: tuple[int, ...] = option((), "sequence lengths", parse=positive_int, metavar="TOKENS", spaced=True)
    micro_batch: int = option(1, "sequences in one call", parse=positive_int, metavar="N")
    methods: tuple[str, ...] = option(
        (),
        f"candidates (default: {','.join(NAMES)}; on the CPU chunked,collective). The untuned default and "
        "collective are always among them",
        choices=NAMES,
        metavar="METHOD,...",
    )
    node_ranks: int = option(
        OverlapConfig().node_ranks,
        "ranks per node, where the group spans several; 0: nodes are found",
        parse=positive_int_or_0,
        metavar="N",
    )
    dtype: str | None = option(None, "default bf16; on the CPU fp32", choices=tuple(DTYPES))
    provider: str = option("auto", "what provides symmetric memory", choices=PROVIDERS)
    network: str = option("auto", "what carries data between nodes of GPUs", choices=("auto", "nccl", "nvshmem"))
    tuning_dir: str = option(OverlapConfig().tuning_dir, "where winners are kept", metavar="DIR")
    connections: int = option(
        1,
        "CUDA_DEVICE_MAX_CONNECTIONS while measuring, as in training; Megatron-Core trains with 1",
        parse=positive_int,
        metavar="N",
    )
    quick: bool = option(False, "fewer and shorter rounds")
    dry_run: bool = option(False, "only print the shapes; needs no torchrun")


def main(arguments: list[str]) -> int:
    """Measure and store. Exit status: 0, or 1 if no method worked for some shape.

    Raises:
        ValueError: wrong arguments.
    """
    what = "Measures which method is fastest for a model's linears; method=auto then takes it:"
    top = Parser("overlap-train tune", description=f"{what}\n\n    {world.START} tune --model llama3-8b --seq 8192")
    add_options(top, Tune)
    asked = from_args(Tune(), top.parse_args(arguments))
    ranks = ranks_of(asked.tp, asked.dry_run)
    cases = cases_from(asked, ranks)
    if asked.dry_run:
        print(screen([shape_row(case, ranks) for case in cases], [], SHAPE_COLUMNS))
        return 0
    return tune(asked, cases)


def ranks_of(asked: int | None, dry_run: bool) -> int:
    """How many ranks share a linear. Raises ValueError where torchrun has started another number."""
    started = os.environ.get("WORLD_SIZE")
    if dry_run and (asked or started):
        return asked or int(started or 0)
    if started is None or "RANK" not in os.environ:
        command = f"torchrun --standalone --nproc-per-node {asked or 4} -m overlap_train tune ..."
        raise ValueError(
            f"--tp: how many ranks? give --tp, or {command}" if dry_run else f"start it under torchrun: {command}"
        )
    if asked not in (None, int(started)):
        raise ValueError(f"--tp {asked}: torchrun has started {started} ranks; start it with --nproc-per-node {asked}")
    return int(started)


def cases_from(asked: Tune, ranks: int) -> list[Case]:
    """What the arguments ask for. Raises ValueError where that is nothing, or cannot be sharded over the ranks."""
    if not (asked.model or asked.column or asked.row):
        raise ValueError(f"which linears? give --model (one of {', '.join(MODELS)}), --column N,K or --row N,K")
    if not asked.seq:
        raise ValueError("how long are sequences? give --seq TOKENS")
    if asked.ulysses and not asked.model:
        raise ValueError("--ulysses: whose attention? give --model")
    ms = [seq * asked.micro_batch for seq in asked.seq]
    cases = model_cases(asked.model, ms, ranks, asked.ulysses) if asked.model else []
    for m, (kind, op, weights) in product(ms, (("column", "ag_gemm", asked.column), ("row", "gemm_rs", asked.row))):
        for n, k in weights:
            cases += cases_of(kind, op, (n, k), m, ranks, f"--{kind} {n},{k}")
    return one_a_bucket(cases, ranks)


def tune(asked: Tune, cases: list[Case]) -> int:
    """Join the ranks, measure, store after each case, and print."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(asked.connections)  # read when CUDA starts, which is in join
    began, here = time.monotonic(), world.join()
    if here.device.type == "cpu":
        here.say("tune: no GPU here. Winners count for CPU processes only, and large shapes take minutes each")
    session = Session(settings_of(asked, here.device), here, Results())
    nodes, results = nodes_of(session), session.results
    refuse_methods_of_one_node(asked.methods, nodes)
    key = key_of(here.device, here.size, nodes, asked.network)
    measure(asked.tuning_dir, key, cases, session)
    results.share_notes(here.group)
    here.say(screen(results.rows, results.notes, columns_of(results.rows)))
    took = time.monotonic() - began
    here.say(f"tune: {len(results.rows)} winners in {where_kept(asked.tuning_dir, key)}, {took:.0f} s")
    shutdown()
    dist.destroy_process_group()
    return 1 if results.failed else 0


def where_kept(folder: str, key: Key) -> str:
    """The file of the winners, and how to train so that it is looked for."""
    ways = [] if folder == OverlapConfig().tuning_dir else [f"{flag_name('tuning_dir')} {folder}"]
    if not reach_of(key.nodes).has_rules and key.gpu != "cpu":
        ways += [
            "CUDA_DEVICE_MAX_CONNECTIONS=1" if key.queues == "one" else "CUDA_DEVICE_MAX_CONNECTIONS unset, or not 1"
        ]
        ways += [f"{flag_name('network')} {key.network}"] if key.network != Key.network else []
    return f"{folder}/{key.file_name}" + (f" (train with {', '.join(ways)})" if ways else "")


def measure(folder: str, key: Key, cases: list[Case], session: Session) -> None:
    """Find the winner of each case, store it, and add its row to the results. Collective."""
    here = session.world
    keep(folder, key, None, here)  # a folder that cannot be written is said before minutes of measuring
    domain = session.domain([case.slot_bytes(here.size, session.settings.dtype) for case in cases])
    world.heat(here.device)
    for number, case in enumerate(cases):
        winner, shape = tune_case(case, domain, session), shape_row(case, here.size)
        if winner is not None:
            keep(folder, key, winner, here)
            session.results.rows.append(shape | figures(winner))
        told = winner.how if winner else "no method works"
        here.say(f"[{number + 1}/{len(cases)}] {' '.join(shape.values())}: {told}")


def settings_of(asked: Tune, device: torch.device) -> Settings:
    """The Settings of the measurements, as the benchmark has them. Raises ValueError for a method that cannot run here."""
    on_gpu = device.type == "cuda"
    dtype = DTYPES[asked.dtype or ("bf16" if on_gpu else "fp32")]
    refuse_kernels_on_cpus(asked.methods, device)
    methods = asked.methods or (NAMES if on_gpu else ("chunked", "collective"))
    limits = OverlapConfig(symmetric_mib=8192, timeout_s=30.0, main_grad="off")
    config = replace(
        limits, provider=asked.provider, tuning_dir=asked.tuning_dir, node_ranks=asked.node_ranks, network=asked.network
    )
    return Settings(methods, dtype, asked.quick, config)


def keep(folder: str, key: Key, winner: Winner | None, here: world.World) -> None:
    """Store on rank 0. Raises ValueError on every rank if that fails."""
    work = partial(save, folder, key, [] if winner is None else [winner]) if here.rank == 0 else lambda: None
    problem = here.attempt(work)
    if problem is not None:
        raise ValueError(f"--tuning-dir {folder}: rank 0 cannot write there ({problem}); name another folder")


def shape_row(case: Case, ranks: int) -> Row:
    """One line of the printed table; sizes are those of one rank's product, M those of all ranks."""
    planned = case.planned(ranks, torch.float32)
    sizes = f"{planned.m}, {planned.n}, {planned.k}"
    return {"linear": case.model, "pass": case.pass_, "kind": planned.kind, "sizes": sizes}


def figures(winner: Winner) -> Row:
    """A winner's figures for the printed table. gain: how many times as fast as collective."""
    gains = [ms / winner.ms[winner.how] for how, ms in winner.ms.items() if how.name == "collective"]
    return {"ms": winner.ms, "winner": str(winner.how), "gain": f"{gains[0]:.2f} x" if gains else None}


SHAPE_COLUMNS = plain({"linear": "linear", "pass": "pass", "kind": "kind", "M, N, K": "sizes"})


def columns_of(rows: list[Row]) -> Columns:
    """The shape, the milliseconds of each method that ran anywhere, the winner and its gain."""
    ran = dict.fromkeys(how for row in rows for how in row["ms"])
    times: list[Any] = [(f"{how} ms", lambda row, how=how: row["ms"].get(how)) for how in sorted(ran, key=str)]
    return (*SHAPE_COLUMNS, *times, *plain({"winner": "winner", "over collective": "gain"}))
