"""How the recipes' programs end."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from gpt import program
from gpt.program import RecipeError

RECIPES = Path(__file__).parents[2] / "recipes"


class Group:
    """What a traceback may keep alive."""


def test_what_a_refused_run_held_is_gone_when_it_leaves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Process groups that live until the interpreter ends may end it by SIGABRT."""
    held: list[weakref.ref[Group]] = []
    gone: list[bool] = []

    def work() -> None:
        group = Group()
        held.append(weakref.ref(group))
        raise RecipeError("no such text")

    monkeypatch.setattr(program, "leave", lambda: gone.append(held[0]() is None))
    assert program.run_program("pretrain_gpt", work) == 2
    assert gone == [True]
    assert capsys.readouterr().err == "pretrain_gpt: error: no such text\n"


@pytest.mark.parametrize("program", ["pretrain_gpt", "compare_mfu"])
@pytest.mark.parametrize(("package", "shown"), [("megatron", "megatron.core"), ("torch", "torch")])
def test_a_missing_package_is_one_line_of_rank_0(program: str, package: str, shown: str) -> None:
    path = RECIPES / f"{program}.py"
    hidden = f"import runpy, sys; sys.modules[{package!r}] = None; sys.path.insert(0, {str(RECIPES)!r})"
    command = [sys.executable, "-c", f"{hidden}; runpy.run_path({str(path)!r}, run_name='__main__')"]
    ended = [
        subprocess.run(command, env={**os.environ, "RANK": rank}, capture_output=True, text=True, timeout=120)
        for rank in ("0", "1")
    ]
    assert [rank.returncode for rank in ended] == [2, 2]
    assert ended[0].stderr.startswith(f"{program}: error: {shown} not installed; run: ")
    assert ended[0].stderr.count("\n") == 1 and f"-m pip install -e '{RECIPES.parent}[megatron]'" in ended[0].stderr
    assert ended[1].stderr == ""
