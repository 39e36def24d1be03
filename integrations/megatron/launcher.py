"""Run a user's Megatron-LM training script, unmodified, with overlapped linears.

The script sees what it would see without us: its own arguments, its own folder first on the import path, `__main__`.
docs/megatron-scripts.md lists what is put into Megatron meanwhile.
"""

from __future__ import annotations

import difflib
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from overlap_train import OverlapConfig
from overlap_train.config import flag_name
from overlap_train.flags import Parser, add_flags, read_config, tell
from overlap_train.integrations.megatron import missing
from overlap_train.integrations.megatron.hooks import ScriptHooks, after_import
from overlap_train.integrations.megatron.main_grad import provide_accumulation_fusion

USAGE = "torchrun [...] -m overlap_train.integrations.megatron SCRIPT.py --overlap-train [the script's arguments]"


class CommandError(ValueError):
    """The command line asks for something that cannot be done."""


@dataclass(frozen=True)
class Command:
    """A script, its arguments (ours included), and what ours ask for: None without --overlap-train."""

    script: Path
    arguments: tuple[str, ...]
    overlap: OverlapConfig | None


def parse(words: Sequence[str]) -> Command:
    """The command of `words`, a command line without the program. Raises CommandError."""
    if not words or words[0].startswith("-"):
        found = f"{words[0]} stands where the script should" if words else "no script given"
        raise CommandError(f"{found}; usage: {USAGE}")
    script = Path(words[0])
    if not script.is_file():
        raise CommandError(f"{script}: no such file (looked in {Path.cwd()}); give the path of the training script")
    return Command(script, tuple(words[1:]), _overlap(words[1:]))


def run(command: Command) -> None:
    """Run the script in this process; returns when it ends, or raises what it raises. Raises RuntimeError if --overlap-train was
    given and the script ended without having built a model that overlaps."""
    hooks = ScriptHooks(command.overlap)
    if command.overlap is not None:
        provide_accumulation_fusion()  # Megatron-LM's scripts ask for it by default
    sys.argv = [str(command.script), *command.arguments]
    # What Python does for a script: its folder takes the place of the one that `python -m` put first.
    sys.path[0] = str(command.script.resolve().parent)
    try:
        with after_import(hooks.by_module()):
            runpy.run_path(str(command.script), run_name="__main__")
    except SystemExit as end:  # Megatron ends this way at --exit-interval, --exit-duration-in-mins and on --help
        if end.code in (None, 0) and "--help" not in command.arguments and "-h" not in command.arguments:
            hooks.finish()
        raise
    hooks.finish()


def main(words: Sequence[str]) -> int:
    """The program; returns its exit status."""
    if list(words[:1]) in (["-h"], ["--help"]):
        add_flags(Parser(usage=USAGE, add_help=False, description=__doc__)).print_help()
        return 0
    try:
        run(parse(words))
    except CommandError as error:
        problem = str(error)
    except ImportError as error:  # the script decides where Megatron is, so nobody knows before
        if (problem := missing(error) or "") == "":
            raise
    else:
        return 0
    tell(f"overlap_train: error: {problem}")  # the same on every rank, and told once
    return 2


def _overlap(arguments: Sequence[str]) -> OverlapConfig | None:
    """What our flags among the script's arguments ask for, before seconds of imports; Megatron's parser checks the rest."""
    parser = Parser(usage=USAGE, add_help=False)
    try:
        ours, others = add_flags(parser).parse_known_args(list(arguments))
        _refuse_unknown(others)
        return read_config(ours)
    except ValueError as error:
        raise CommandError(str(error)) from error


def _refuse_unknown(words: Sequence[str]) -> None:
    """Raise CommandError for a misspelt flag of ours. Megatron's parser would name it below a thousand lines of its own."""
    wrong = next((word for word in words if word.startswith(("--overlap-train", "--overlap_train"))), None)
    if wrong is None:
        return
    flags = {"": "--overlap-train", **{setting.name: flag_name(setting.name) for setting in fields(OverlapConfig)}}
    wrong = wrong.partition("=")[0]
    name = wrong.replace("-", "_").removeprefix("__overlap_train").strip("_")
    near = difflib.get_close_matches(name, flags, n=1)
    instead = f"; did you mean {flags[near[0]]}?" if near else ""
    listed = "-m overlap_train.integrations.megatron --help lists them"
    raise CommandError(f"{wrong} is no flag of overlap_train{instead} ({listed})")
