"""`overlap-train tune`: measure which method is fastest for the linears of a model, and keep the winners for `auto`."""

from __future__ import annotations

import argparse
import os
import re
import time
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.distributed as dist

from ... import OverlapConfig, shutdown
from ...flags import NETWORKS, PROVIDERS, Parser, add_options, from_args, option, positive_int, positive_int_or_0
from ...select.method import NAMES
from ...select.table import Key, Winner, key_of, save
from ..measure import world
from ..measure.cases import Case, cases_of
from ..measure.models import MODELS
from ..measure.results import Results
from ..measure.runs import Session, nodes_of
from .candidates import model_cases, one_a_bucket, tune_case

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Sizes = tuple[int, int]


def _sizes(text: str) -> Sizes:
    found = re.fullmatch(r"([1-9][0-9]*),([1-9][0-9]*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not N,K: the sizes of a weight, such as 128256,4096")
    return int(found[1]), int(found[2])


_weights = partial(option, (), parse=_sizes, metavar="N,K", spaced=True)


@dataclass(frozen=True)
class Tune:
    """What the tuner is told."""

    model: str | None = option(
        None, f"qkv, proj, fc1 and fc2 of one of {', '.join(MODELS)}", choices=tuple(MODELS), metavar="NAME"
    )
    column: tuple[Sizes, ...] = _weights(
        "column linears by their whole weights [N, K]: output layer, unlisted qkv or fc1"
    )
    row: tuple[Sizes, ...] = _weights("row linears by their whole weights [N, K]: unlisted proj or fc2")
    ulysses: bool = option(
        False, "measure the QKV and output projections of --model under Ulysses, instead of its linears under TP"
    )
    seq: tuple[int, ...] = option((), "sequence lengths", parse=positive_int, metavar="TOKENS", spaced=True)
    micro_batch: int = option(1, "sequences in one call", parse=positive_int, metavar="N")
    node_ranks: int = option(
        0, "ranks per node, where the group spans several; 0: nodes are found", parse=positive_int_or_0, metavar="N"
    )
    dtype: str | None = option(None, "default bf16; on the CPU fp32", choices=tuple(DTYPES))
    provider: str = option("auto", "what provides symmetric memory", choices=PROVIDERS)
    network: str = option("auto", "what carries data between nodes of GPUs", choices=NETWORKS)
    tuning_dir: str = option(OverlapConfig().tuning_dir, "where winners are kept", metavar="DIR")
    quick: bool = option(False, "fewer and shorter rounds")


def main(arguments: list[str]) -> int:
    """Measure and store. Exit status: 0, or 1 if no method worked for some shape.

    Raises:
        ValueError: wrong arguments.
    """
    what = "Measures which method is fastest for a model's linears; method=auto then takes it:"
    top = Parser("overlap-train tune", description=f"{what}\n\n    {world.START} tune --model llama3-8b --seq 8192")
    add_options(top, Tune)
    asked = from_args(Tune(), top.parse_args(arguments))
    cases = _cases_from(asked, int(os.environ.get("WORLD_SIZE", "1")))
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # read when CUDA starts; Megatron-Core trains with 1
    here, began, found = world.join(), time.monotonic(), 0
    on_gpu = here.device.type == "cuda"
    if not on_gpu:
        here.say("tune: no GPU here. Winners count for CPU processes only, and large shapes take minutes each")
    config = OverlapConfig(
        symmetric_mib=8192, timeout_s=30.0, main_grad="off", provider=asked.provider, tuning_dir=asked.tuning_dir,
        node_ranks=asked.node_ranks, network=asked.network,
    )  # fmt: skip
    methods = NAMES if on_gpu else ("chunked", "collective")
    dtype = DTYPES[asked.dtype or ("bf16" if on_gpu else "fp32")]
    session = Session(methods, dtype, asked.quick, config, here, Results())
    key = key_of(here.device, here.size, nodes_of(session), asked.network)
    keep(asked.tuning_dir, key, None, here)  # a folder that cannot be written is said before minutes of measuring
    domain = session.domain([case.slot_bytes(here.size, dtype) for case in cases])
    world.heat(here.device)
    for number, case in enumerate(cases):
        winner = tune_case(case, domain, session)
        if winner is not None:
            found += 1
            keep(asked.tuning_dir, key, winner, here)
        told = _told(winner) if winner else "no method works"
        # M, N, K: of one rank's product, M of all ranks
        planned = case.planned(here.size, torch.float32)
        here.say(f"[{number + 1}/{len(cases)}] {case.model} {case.pass_} {planned.kind}, {planned}: {told}")
    here.say(f"tune: {found} winners in {asked.tuning_dir}/{key.file_name}, {time.monotonic() - began:.0f} s")
    session.results.share_notes(here.group)
    for note in session.results.notes:
        here.say(note)
    shutdown()
    dist.destroy_process_group()
    return 1 if session.results.failed else 0


def _cases_from(asked: Tune, ranks: int) -> list[Case]:
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


def keep(folder: str, key: Key, winner: Winner | None, here: world.World) -> None:
    """Store on rank 0. Raises ValueError on every rank if that fails."""
    work = partial(save, folder, key, [] if winner is None else [winner]) if here.rank == 0 else lambda: None
    problem = here.attempt(work)
    if problem is not None:
        raise ValueError(f"--tuning-dir {folder}: rank 0 cannot write there ({problem}); name another folder")


def _told(winner: Winner) -> str:
    """ "fused, 1.21 x as fast as collective (fused 0.412 ms, collective 0.500 ms)"."""
    gains = [ms / winner.ms[winner.how] for how, ms in winner.ms.items() if how.name == "collective"]
    gain = f", {gains[0]:.2f} x as fast as collective" if gains else ""
    times = sorted(winner.ms.items(), key=lambda item: item[1])
    return f"{winner.how}{gain} ({', '.join(f'{how} {ms:.3f} ms' for how, ms in times)})"
