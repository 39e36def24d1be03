"""The command `overlap-train`: one subcommand for each thing that is done around training. Each lives with what it runs."""

from __future__ import annotations

import importlib
import sys
from functools import partial

from . import __version__
from .flags import is_rank_0, run_command

# name -> (module whose main(arguments) -> exit status runs it, what it does)
COMMANDS = {
    "doctor": ("tools.doctor.command", "check versions, GPUs, links and symmetric memory; also under torchrun"),
    "tune": ("tools.tune.command", "measure which method is fastest for a model's shapes; under torchrun"),
    "bench": ("tools.bench.command", "measure operators and layers against NCCL and others; under torchrun"),
    "plan": ("tools.plan.command", "predict what overlap brings on a machine; needs no GPU"),
    "launch": ("tools.slurm.command", "write and submit a Slurm job"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand. Exit status: the subcommand's; 2, after one line, for what the user can put right."""
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] in ("-h", "--help", "--version"):
        if is_rank_0():
            print(f"overlap-train {__version__}" if words[:1] == ["--version"] else usage())
        return 0
    program = "overlap-train" + (f" {words[0]}" if words[0] in COMMANDS else "")
    return run_command(program, partial(_run, words[0], words[1:]))


def _run(name: str, arguments: list[str]) -> int:
    if name not in COMMANDS:
        raise ValueError(f"{name!r} is not one of {', '.join(COMMANDS)}")
    return importlib.import_module(f"overlap_train.{COMMANDS[name][0]}").main(arguments)


def usage() -> str:
    """The list of subcommands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    forms = [
        "usage: overlap-train COMMAND [arguments]",
        "       overlap-train COMMAND --help",
        "       overlap-train --version",
    ]
    return "\n".join([*forms, "", *lines])
