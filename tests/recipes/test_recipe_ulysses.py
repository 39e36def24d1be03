"""recipes/pretrain_gpt.py --cp: the losses, the sample and the checkpoint are those of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.recipe_runs import run_recipe


def test_losses_sample_and_checkpoint_are_those_of_one_rank(tmp_path: Path):
    flags = ("--sample-bytes", 3, "--temperature", 0)
    shared = run_recipe(2, "--overlap-train", "--cp", 2, "--save", tmp_path, "--save-interval", 3, *flags)
    assert [rank.exit_code for rank in shared] == [0, 0], shared[0].errors
    first = shared[0]
    assert "tensor parallel 1, context parallel 2 (Ulysses), data parallel 1" in first.output
    assert "GEMM + A2A (CP 2)" in first.output and "A2A(x) + GEMM (CP 2)" in first.output
    alone = run_recipe(1, *flags)[0]
    assert first.losses() == pytest.approx(alone.losses(), rel=1e-5)
    sample = " temperature 0.0:\n"
    assert first.output.partition(sample)[2][:3] == alone.output.partition(sample)[2][:3] != ""
    resumed = run_recipe(1, "--load", tmp_path / "iter_0000003")[0]
    assert resumed.losses() == pytest.approx({i: first.losses()[i] for i in (4, 5, 6)}, rel=1e-5), resumed.errors
