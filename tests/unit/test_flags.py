"""Flags made from the fields of a dataclass."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import pytest

from overlap_train import OverlapConfig
from overlap_train.flags import (
    Parser,
    add_flags,
    add_options,
    config_from_args,
    from_args,
    option,
    positive_float,
    positive_int,
)


@dataclass(frozen=True)
class Options:
    """One field of each kind."""

    kind: str = "a"  # no flag
    words: tuple[str, ...] = option(("x",), "words", choices=("x", "y"))
    numbers: tuple[int, ...] = option((), "numbers", parse=int)
    sizes: tuple[int, ...] = option((), "sizes", parse=positive_int, spaced=True)
    again: tuple[str, ...] = option((), "may be repeated", repeated=True)
    is_quick: bool = option(False, "a switch")
    count: int = option(4, "a number")
    rate: float | None = option(None, "a rate; default: measured", parse=positive_float)


def parsed(*words: str, initial: Options | None = None) -> Options:
    initial = initial or Options()
    return from_args(initial, add_options(Parser("x"), initial).parse_args(words))


def test_what_is_not_given_has_the_defaults_of_the_instance() -> None:
    assert parsed() == Options()
    changed = replace(Options(), kind="b", count=9, is_quick=True)
    assert parsed("--words", "y", initial=changed) == replace(changed, words=("y",))


def test_what_is_not_given_is_not_in_the_namespace() -> None:
    """Megatron prints the whole namespace: `overlap_train_method ... None` looked like the setting."""
    parser = add_flags(argparse.ArgumentParser())
    assert vars(parser.parse_args([])) == {"overlap_train": False}
    args = parser.parse_args(["--overlap-train", "--overlap-train-method", "chunked"])
    assert vars(args) == {"overlap_train": True, "overlap_train_method": "chunked"}
    assert config_from_args(args) == OverlapConfig(method="chunked")


def test_all_kinds_of_values() -> None:
    words = "--words x,y --numbers 1,2 --sizes 3 4 --again=--a --again=b --is-quick --count 7 --rate 0.5"
    assert parsed(*words.split()) == Options("a", ("x", "y"), (1, 2), (3, 4), ("--a", "b"), True, 7, 0.5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--words z", "argument --words: 'z' is not one of x, y"), ("--words ,", "',' is not one of x, y"),
        ("--sizes 0", "'0' is not a positive number"), ("--rate nan", "'nan' is not a positive number"),
        ("--count many", "--count: invalid int value: 'many'"), ("--kind b", "unrecognized arguments: --kind b"),
        ("--coun 7", "unrecognized arguments: --coun 7"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as found:
        parsed(*words.split())
    assert "--help lists the flags" in str(found.value)


def test_the_help_shows_defaults_and_choices() -> None:
    text = add_options(argparse.ArgumentParser("x"), replace(Options(), count=9)).format_help()
    assert "a number (default: 9)" in text and "words (default: x)" in text and "--words x,y" in text
    assert "--numbers" in text and "measured (default" not in text
    assert "--count N" in text and "--rate X" in text
