"""The command `overlap-train`: one subcommand for each thing that is done around training. Each lives with what it runs."""

from __future__ import annotations

import importlib
import sys

# name -> (module whose main(arguments) -> exit status runs it, what it does)
COMMANDS = {
    "doctor": ("overlap_train.doctor.command", "check versions, GPUs, links and symmetric memory; also under torchrun"),
    "tune": ("overlap_train.tuning.command", "measure which method is fastest for a model's shapes; under torchrun"),
    "bench": ("overlap_train.bench.command", "measure operators and layers against NCCL and others; under torchrun"),
    "launch": ("overlap_train.slurm.command", "write and submit a Slurm job"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand; 2 for one that does not exist."""
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] not in COMMANDS:
        print(f"overlap-train: {words[0]!r} is not one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return importlib.import_module(COMMANDS[words[0]][0]).main(words[1:])


def usage() -> str:
    """The list of subcommands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: overlap-train COMMAND [arguments]; --help behind a command says more", "", *lines])
