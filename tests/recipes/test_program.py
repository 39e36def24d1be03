"""How the recipes' programs end."""

from __future__ import annotations

import weakref

import pytest

from gpt import program
from gpt.errors import RecipeError


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
    assert program.run_program("pretrain_gpt", 0, work) == 2
    assert gone == [True]
    assert capsys.readouterr().err == "pretrain_gpt: error: no such text\n"
