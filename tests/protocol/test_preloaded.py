"""Ranks find the kernels that their environment asks for, whatever the process that they are forked from has imported."""

from __future__ import annotations

import pytest

from tests.processes import run_ranks, values


def _found(rank: int, world: int) -> tuple[bool, bool]:
    from overlap_train.ops.launch import is_interpreted
    from tests import faster_interpreter

    return is_interpreted(), faster_interpreter.is_installed()


def test_kernels_are_interpreted_where_a_rank_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in ("1", "0"):
        monkeypatch.setenv("TRITON_INTERPRET", asked)
        interpreted, faster = values(run_ranks(1, _found))[0]
        assert interpreted == (asked == "1")
        assert not faster or interpreted
