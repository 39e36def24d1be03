"""Command-line flags generated from OverlapConfig, in Megatron's style."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from .config import OverlapConfig, flag_name


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--overlap-train` and one `--overlap-train-<field>` for each field of OverlapConfig; returns the parser.

    Works as Megatron's `extra_args_provider`.
    """
    group = parser.add_argument_group("overlap_train", "overlapped tensor- and sequence-parallel linears")
    group.add_argument(
        "--overlap-train", action="store_true", help="overlap TP/SP communication with the linears' GEMMs"
    )
    for setting in fields(OverlapConfig):
        several = isinstance(setting.default, tuple)
        group.add_argument(
            flag_name(setting.name),
            default=None,
            type=_comma_separated if several else type(setting.default),
            choices=None if several else setting.metadata["choices"],
            metavar=",".join(setting.metadata["choices"]) if several else None,
            help=f"{setting.metadata['help']} (default: {_shown(setting.default)})",
        )
    return parser


def config_from_args(args: argparse.Namespace) -> OverlapConfig | None:
    """The OverlapConfig that parsed flags ask for; None without `--overlap-train`.

    Raises:
        ValueError: a value outside its rule, or an `--overlap-train-...` flag without `--overlap-train`, which could not act.
    """
    given = {s.name: value for s in fields(OverlapConfig) if (value := getattr(args, _dest(s.name), None)) is not None}
    if args.overlap_train:
        return OverlapConfig(**given)
    if given:
        flags = ", ".join(flag_name(name) for name in given)
        raise ValueError(f"{flags} given without --overlap-train, so nothing would be overlapped: add --overlap-train")
    return None


def _dest(name: str) -> str:
    return flag_name(name)[2:].replace("-", "_")


def _comma_separated(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _shown(default: Any) -> str:
    return ",".join(default) if isinstance(default, tuple) else str(default)
