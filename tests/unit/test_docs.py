"""Documentation that would otherwise drift: the flags page, and the files that pages name."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from overlap_train import OverlapConfig
from overlap_train.cli import COMMANDS
from overlap_train.config import flag_name

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("benchmarks/*.md")),
    *sorted(ROOT.glob("docs/*.md")),
]


def test_the_flags_page_says_what_the_config_says() -> None:
    page = (ROOT / "docs" / "flags.md").read_text()
    for setting in fields(OverlapConfig):
        default = ",".join(setting.default) if isinstance(setting.default, tuple) else setting.default
        assert f"| `{flag_name(setting.name)}` | `{default}` | {setting.metadata['help']} |" in page
    assert page.count("`--overlap-train-") >= len(fields(OverlapConfig))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_exist(page: Path) -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for target in re.findall(r"`make ([a-z-]+)", page.read_text()):
        assert target in known, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_and_commands_exist(page: Path) -> None:
    text = page.read_text()
    flags = {flag_name(setting.name) for setting in fields(OverlapConfig)}
    for flag in re.findall(r"--overlap-train-[a-z0-9-]*[a-z0-9]", text):
        assert flag in flags, flag
    for command in re.findall(
        r"(?:^|[`(])(?:overlap-train|torchrun [^`|\n]*-m overlap_train) ([a-z]+)", text, re.MULTILINE
    ):
        assert command in COMMANDS, command
