"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import OverlapConfig, shutdown
from ..config import METHODS
from . import layers, operators, output, plots, world
from .settings import Settings
from .shapes import MODELS, OPS, PASSES, TABLES_1_2, TINY_MODELS, cases, layer_cases


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Exit status: 0, 1 if one of our methods failed or was wrong, 2 for wrong arguments."""
    args = parser().parse_args(arguments)
    try:
        if args.command == "plot":
            for path in plots.draw(args.folder):
                print(path)
            return 0
        return benchmark(args)
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"overlap_train.bench: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="overlap_train.bench", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    ops = commands.add_parser(
        "operators", help="AG+GEMM and GEMM+RS, pass by pass, against NCCL, async-TP and the bound"
    )
    _common(ops)
    ops.add_argument(
        "--shapes",
        type=_words,
        default=list(TABLES_1_2),
        metavar="MODEL,...",
        help=f"default {','.join(TABLES_1_2)}; all: also {', '.join(m for m in MODELS if m not in TABLES_1_2)}",
    )
    ops.add_argument("--ops", type=_of(OPS), default=list(OPS), metavar="OP,...", help=f"of {','.join(OPS)}")
    ops.add_argument(
        "--passes",
        type=_of(PASSES),
        default=["fprop", "dgrad"],
        metavar="PASS,...",
        help=f"of {','.join(PASSES)}; default fprop,dgrad",
    )
    # --rows, too: torchrun takes --m for an abbreviation of its own options
    ops.add_argument(
        "--rows", "--m", dest="m", type=int, nargs="+", default=None, metavar="M", help="global rows; default 8192"
    )
    lay = commands.add_parser("layers", help="forward and backward of one column and one row linear")
    _common(lay)
    lay.add_argument(
        "--layers", type=_words, default=[], metavar="LAYER,...", help="default: those of the table of goals"
    )
    lay.add_argument(
        "--seq", type=int, nargs="+", default=[], help="sequence lengths; default 8192, and 4096 for llama3-8b-mlp"
    )
    plot = commands.add_parser("plot", help="draw the results of a folder (needs matplotlib)")
    plot.add_argument("folder", type=Path)
    return top


def _common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=Path, default=None, metavar="DIR", help="write DIR/<command>.json and .md")
    command.add_argument(
        "--methods",
        type=_of(METHODS),
        default=None,
        metavar="METHOD,...",
        help="default fused,direct,chunked,collective; on the CPU chunked,collective",
    )
    command.add_argument("--provider", default="auto", help="symmetric memory: auto, nvshmem, torch or host")
    command.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    command.add_argument(
        "--tiny", action="store_true", help="one tiny shape in fp32, to exercise the code on CPU processes"
    )
    command.add_argument(
        "--connections",
        type=int,
        default=None,
        metavar="N",
        help="CUDA_DEVICE_MAX_CONNECTIONS; default: 1 for layers, which Megatron-Core needs, else unchanged",
    )


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _of(allowed: tuple[str, ...]) -> Any:
    """An argparse type: comma-separated words of `allowed`."""

    def parse(text: str) -> list[str]:
        words = _words(text)
        wrong = [word for word in words if word not in allowed]
        if wrong or not words:
            raise argparse.ArgumentTypeError(f"{wrong[0] if wrong else text!r} is not one of {', '.join(allowed)}")
        return words

    return parse


def benchmark(args: argparse.Namespace) -> int:
    """Join the ranks, measure, write and print."""
    connections = args.connections or (1 if args.command == "layers" else None)
    if connections is not None:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(connections)  # read when CUDA starts, which is below
    began, here = time.monotonic(), world.join()
    results = output.Results(_json_path(args) if here.rank == 0 else None, output.hardware(here.device, here.size))
    _measure(args, here, results)
    output.collect_notes(results, here.group)
    if here.rank == 0:
        _report(args, results)
    here.say(f"{args.command}: {len(results.rows)} rows in {time.monotonic() - began:.0f} s")
    shutdown()  # not after an error: it needs all ranks
    dist.destroy_process_group()
    return 1 if results.failed else 0


def _measure(args: argparse.Namespace, here: world.World, results: output.Results) -> None:
    settings = _settings(args, here.device)
    if args.command == "layers":
        names, sequences = (["tiny"], [16]) if args.tiny else (args.layers, args.seq)
        chosen_layers = layer_cases(names, sequences, here.size)
        world.heat(here.device, 0.5)
        layers.run(chosen_layers, settings, here, results)
    else:
        models = {"all": list(MODELS), "tiny": list(TINY_MODELS)}.get("tiny" if args.tiny else ",".join(args.shapes))
        ms = args.m or [16 if args.tiny else 8192]
        chosen = cases(models or args.shapes, args.ops, args.passes, ms, here.size, args.tiny)
        world.heat(here.device, 0.5)
        operators.run(chosen, settings, here, results)


def _settings(args: argparse.Namespace, device: torch.device) -> Settings:
    methods = args.methods or [*(["fused", "direct"] if device.type == "cuda" else []), "chunked", "collective"]
    dtype = torch.float32 if args.tiny else torch.bfloat16
    # symmetric_mib: enough for three slots of 1 GiB, the largest shape with M = 32768
    config = OverlapConfig(provider=args.provider, symmetric_mib=8192, timeout_s=30.0, main_grad="off")
    return Settings(tuple(methods), dtype, args.quick, config)


def _json_path(args: argparse.Namespace) -> Path | None:
    return args.out / f"{args.command}.json" if args.out else None


def _report(args: argparse.Namespace, results: output.Results) -> None:
    print(output.screen(results.rows, results.notes), flush=True)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{args.command}.md").write_text(output.markdown(results.rows, results.notes))
