"""recipes/own_program.py as it is, and without its three lines: the loss falls, and both have the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.recipe_runs import RECIPE, run_recipe

PROGRAM = RECIPE.with_name("own_program.py")


def losses(output: str) -> list[float]:
    return [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step ")]


def test_three_lines_overlap_the_program_and_change_no_loss(tmp_path: Path) -> None:
    lines = PROGRAM.read_text().splitlines()
    plain = tmp_path / "plain.py"
    plain.write_text("\n".join(line for line in lines if not line.endswith("# (+)")))
    assert len(lines) <= 50 and len(plain.read_text().splitlines()) == len(lines) - 3
    overlapped, megatron = (run_recipe(2, program=(str(program),))[0] for program in (PROGRAM, plain))
    assert "9 of 9 linears run our operators" in overlapped.output, overlapped.errors
    assert "overlap_train" not in megatron.output
    assert losses(overlapped.output) == pytest.approx(losses(megatron.output), abs=2e-4)
    assert losses(overlapped.output)[-1] < 1 and len(losses(megatron.output)) == 20
