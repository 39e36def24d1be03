"""Command-line flags made from the fields of frozen dataclasses, and one line for what a user can put right.

A field whose metadata has a `help` is a flag: `gpus_per_node` is `--gpus-per-node`. `option` makes such a field. Every command of
`overlap-train` and the flags of OverlapConfig are made here.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import Field, field, fields, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

from .config import OverlapConfig

PREFIX = "overlap-train-"
PROVIDERS, NETWORKS = (
    next(f.metadata["choices"] for f in fields(OverlapConfig) if f.name == name) for name in ("provider", "network")
)
# What to install where a tool needs a package that is not there.
PIP_NAMES = {"megatron": "megatron-core", "nvshmem": "nvshmem4py-cu13"} | {
    name: name for name in ("torch", "numpy", "packaging", "triton", "matplotlib")
}
RANK_0_S = 10.0  # what rank 0 gets to say what is wrong before other ranks end; torchrun ends them once it has
Options = TypeVar("Options")


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    parse: Callable[[str], Any] | None = None,
    metavar: str | None = None,
    spaced: bool = False,
    repeated: bool = False,
) -> Any:
    """A field that is a flag. A bool is a switch. A tuple holds values separated by commas, one of `choices` or read by `parse`.

    spaced: a tuple's values are separated by blanks. repeated: each flag adds one.
    """
    metadata = {"help": help, "choices": choices, "parse": parse, "metavar": metavar}
    return field(default=default, metadata={**metadata, "spaced": spaced, "repeated": repeated})


def option_fields(options: Any) -> list[Field[Any]]:
    """The fields of a dataclass, or of an instance, that are flags."""
    return [found for found in fields(options) if "help" in found.metadata]


def flag(name: str, prefix: str = "") -> str:
    """`gpus_per_node` -> `--gpus-per-node`."""
    return f"--{prefix}{name.replace('_', '-')}"


def shown(options: Any, name: str) -> str:
    """`--gpus-per-node 8`, as an error names it."""
    return f"{flag(name)} {getattr(options, name)}"


def add_options(parser: Any, options: Any, prefix: str = "") -> Any:
    """Add the flags of a dataclass, or of an instance whose values are the defaults, to a parser or group; returns it."""
    for found in option_fields(options):
        default = found.default if isinstance(options, type) else getattr(options, found.name)
        text = found.metadata["help"] + _default_shown(default)
        # A flag that is not given is not in the namespace: Megatron prints all arguments, and a None would look like the setting.
        parser.add_argument(flag(found.name, prefix), default=argparse.SUPPRESS, help=text, **_reading(found, default))
    return parser


def values_of(options: Any, args: argparse.Namespace, prefix: str = "") -> dict[str, Any]:
    """The values of those fields whose flags were given."""
    names = {found.name: (prefix + found.name).replace("-", "_") for found in option_fields(options)}
    given = {name: value for name, dest in names.items() if (value := getattr(args, dest, None)) is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def from_args(initial: Options, args: argparse.Namespace) -> Options:
    """`initial` with what parsed flags say."""
    return replace(initial, **values_of(initial, args))  # type: ignore[type-var]


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--overlap-train` and one `--overlap-train-<field>` for each field of OverlapConfig; returns the parser.

    Works as Megatron's `extra_args_provider`.
    """
    group = parser.add_argument_group("overlap_train", "overlapped tensor- and sequence-parallel linears")
    group.add_argument(
        "--overlap-train", action="store_true", help="overlap TP/SP communication with the linears' GEMMs"
    )
    add_options(group, OverlapConfig, PREFIX)
    return parser


def config_from_args(args: argparse.Namespace) -> OverlapConfig | None:
    """The OverlapConfig that parsed flags ask for; None without `--overlap-train`.

    Flags that cannot be followed end the program as argparse ends it: one line on standard error, of rank 0, and status 2.
    """
    try:
        return read_config(args)
    except ValueError as error:
        tell(f"{os.path.basename(sys.argv[0])}: error: {error}")
        sys.exit(2)


def read_config(args: argparse.Namespace) -> OverlapConfig | None:
    """`config_from_args` for a caller that reports errors itself.

    Raises:
        ValueError: a value outside its rule, or an `--overlap-train-...` flag without `--overlap-train`, which could not act.
    """
    given = values_of(OverlapConfig, args, PREFIX)
    if args.overlap_train:
        return OverlapConfig(**given)
    if given:
        names = ", ".join(flag(name, PREFIX) for name in given)
        raise ValueError(f"{names} given without --overlap-train, so nothing would be overlapped: add --overlap-train")
    return None


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ValueError for a wrong flag, for `run_command` to print, and whose help comes from rank 0
    alone. Commands in its description have lines of their own."""

    def __init__(self, prog: str | None = None, **settings: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, formatter_class=formatter, allow_abbrev=False, **settings)  # --sav would be --save

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists the flags)")

    def print_help(self, file: Any = None) -> None:
        if is_rank_0():
            super().print_help(file)


def is_rank_0() -> bool:
    """Whether this process is the launcher's first rank, or no rank of any."""
    return os.environ.get("RANK", "0") == "0"


def run_command(program: str, work: Callable[[], int]) -> int:
    """Run a command; returns its exit status. A ValueError or a missing package is one line of rank 0, and status 2.

    torchrun adds its own summary below the line, as it does for any status but 0.
    """
    try:
        return work()
    except BrokenPipeError:  # `... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return 1
    except ValueError as error:
        tell(f"{program}: error: {error}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PIP_NAMES:
            raise
        tell(f"{program} needs {package}: pip install {PIP_NAMES[package]!r}")
    return 2


def tell(message: str) -> None:
    """Print a line that all ranks would print, on rank 0 only.

    Under torchrun the other ranks wait a little before they end: it ends all ranks when the first one has ended, and rank 0 may
    still be starting.
    """
    if is_rank_0():
        sys.stdout.flush()
        print(message, file=sys.stderr, flush=True)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(RANK_0_S)


def positive(kind: type[int] | type[float], text: str, or_zero: bool = False) -> Any:
    """A number above zero, for `parse`; or_zero: or zero."""
    try:
        value = kind(text)
    except ValueError:
        value = kind(-1)
    if not (value > 0 or (or_zero and value == 0)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number{' or 0' if or_zero else ''}")
    return value


positive_int, positive_float = partial(positive, int), partial(positive, float)
positive_int_or_0 = partial(positive_int, or_zero=True)


def _reading(found: Field[Any], default: Any) -> dict[str, Any]:
    """How argparse reads the value of a field."""
    choices, parse, metavar = (found.metadata.get(name) for name in ("choices", "parse", "metavar"))
    if isinstance(default, bool):
        return {"action": "store_true"}
    if not isinstance(default, tuple):
        kind = parse or (str if default is None else type(default))
        number = kind.args[0] if isinstance(kind, partial) else kind  # of `positive`
        usual = None if choices else {int: "N", float: "X"}.get(number, "TEXT")
        return {"type": kind, "choices": choices, "metavar": metavar or usual}
    if found.metadata.get("repeated"):
        return {"action": "append", "metavar": metavar}
    if found.metadata.get("spaced"):
        return {"type": parse, "nargs": "+", "metavar": metavar}
    names = metavar or ",".join(choices or ("A", "B", "..."))
    return {"type": partial(_words, choices, parse or str), "metavar": names}


def _words(choices: tuple[str, ...] | None, parse: Callable[[str], Any], text: str) -> tuple[Any, ...]:
    words = tuple(part.strip() for part in text.split(",") if part.strip())
    wrong = [word for word in words if word not in choices] if choices else []
    if wrong or (choices and not words):
        raise argparse.ArgumentTypeError(f"{(wrong or [text])[0]!r} is not one of {', '.join(choices or ())}")
    return tuple(map(parse, words))


def _default_shown(default: Any) -> str:
    if default is None or default is False or default in ("", ()):
        return ""
    return f" (default: {','.join(map(str, default)) if isinstance(default, tuple) else default})"
