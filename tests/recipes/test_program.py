"""How the recipes' programs end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from gpt import program
from gpt.program import RecipeError
from tests.ports import free_ports

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


LOSES_A_RANK = """
import os
import sys
import torch
import torch.distributed as dist
from gpt import program

def work():
    world = program.join_ranks()
    dist.barrier()
    if world.rank == 1:
        os._exit(0)
    dist.all_reduce(torch.ones(1))

sys.exit(program.run_program("pretrain_gpt", work))
"""


def test_a_rank_whose_peer_is_gone_in_a_collective_of_torchs_own_says_so_and_ends() -> None:
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    environment = {**os.environ, **store, "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(RECIPES)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LOSES_A_RANK],
            env={**environment, "RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    _, errors = ranks[0].communicate(timeout=120)
    ranks[1].communicate(timeout=120)
    assert ranks[0].returncode == 3
    assert "in all_reduce" in errors, "the traceback shows which collective it was"
    assert re.search("pretrain_gpt: error: a collective of Megatron's or torch's own lost a rank: .*gloo", errors)


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
