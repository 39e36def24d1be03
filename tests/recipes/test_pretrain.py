"""recipes/pretrain_gpt.py for a few steps: all layouts have the losses of Megatron alone, and a resumed run has the same bits."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.processes import run_ranks, values
from tests.recipes.recipe_runs import RECIPE, SMALL, Ended, joined, run_recipe

TWO_LAYERS = ("--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 4, "--num-query-groups", 2)


def runs_of(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Flags of each run of the session, in order; later ones load what earlier ones have saved."""
    on, first = "--overlap-train", folder / "first"
    return {
        "overlapped": (on, "--save", first, "--save-interval", 3, "--sample-bytes", 4),
        "megatron": (),
        "replicas": ("--tp", 1),
        "ulysses": (on, "--cp", 2, "--sample-bytes", 4),
        "resumed": (on, "--load", first / "iter_0000003", "--save", folder / "second"),
        "resumed by replicas": ("--tp", 1, "--load", first / "iter_0000003"),
        "twice the batch": (on, "--load", first / "iter_0000003", "--global-batch-size", 16),
        "kept": (on, *TWO_LAYERS),
        "recomputed": (on, *TWO_LAYERS, "--recompute", "full"),
        "attention recomputed": (on, *TWO_LAYERS, "--recompute", "selective"),
        "another model": (*TWO_LAYERS, "--load", first),
        "adapters": ("--lora", 4, "--load", first),
        "no provider": (on, "--overlap-train-provider", "torch"),
        "no checkpoint": ("--load", folder),
        "would overwrite": ("--save", first),
        "cannot be written": ("--save", "/proc/nowhere"),
        "no text": ("--text", "/no/such/file"),
        "diverges": ("--lr", 1e20, "--lr-warmup-iters", 0, "--save", folder / "diverged"),
    }


def train_all(rank: int, world: int, folder: Path) -> dict[str, Ended]:
    """Called in each process: every run, one after the other."""
    from megatron.core import parallel_state

    from gpt.loop import run
    from gpt.program import RecipeError
    from gpt.settings import read_flags
    from overlap_train import shutdown

    ended = {}
    for name, flags in runs_of(folder).items():
        said, refusal = io.StringIO(), ""
        words = [str(word) for pair in SMALL.items() for word in pair] + [str(word) for word in flags]
        with contextlib.redirect_stdout(said), joined():
            try:
                run(*read_flags(words, None, world, on_gpu=False))
            except RecipeError as error:
                refusal = str(error)
        shutdown()
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        ended[name] = Ended(2 if refusal else 0, said.getvalue(), refusal)
    return ended


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Ended]]:
    return values(run_ranks(2, train_all, folder, limit_s=280))


def test_a_run_prints_its_losses_beside_the_bigrams_and_a_sample(ranks: list[dict[str, Ended]]) -> None:
    first = ranks[0]["overlapped"]
    assert list(first.losses()) == [1, 2, 3, 4, 5, 6]
    assert first.losses()[6] < first.losses()[1]
    for text in (
        "2 on CPU, tensor parallel 2",
        "validation loss | model ",
        "| byte bigram ",
        "sample, 4 bytes",
        "chunked",
    ):
        assert text in first.output, text
    assert "linear_fc1" not in ranks[0]["megatron"].output
    assert ranks[1]["megatron"].output == ""


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("overlapped", "megatron"),
        ("replicas", "megatron"),
        ("ulysses", "megatron"),
        ("recomputed", "kept"),
        ("attention recomputed", "kept"),
    ],
)
def test_losses_are_those_without_it(ranks: list[dict[str, Ended]], name: str, reference: str) -> None:
    found, expected = ranks[0][name].losses(), ranks[0][reference].losses()
    assert len(found) == 6 and found == pytest.approx(expected, rel=1e-5)


def test_ulysses_overlaps_and_samples_what_one_tensor_parallel_group_samples(ranks: list[dict[str, Ended]]) -> None:
    output = ranks[0]["ulysses"].output
    assert "GEMM + A2A (CP 2)" in output and "A2A(x) + GEMM (CP 2)" in output
    assert output.partition("sample,")[2] == ranks[0]["overlapped"].output.partition("sample,")[2]


@pytest.mark.parametrize("name", ["resumed", "resumed by replicas"])
def test_a_resumed_run_goes_on_with_the_same_losses(ranks: list[dict[str, Ended]], name: str) -> None:
    expected = {step: ranks[0]["overlapped"].losses()[step] for step in (4, 5, 6)}
    assert ranks[0][name].losses() == pytest.approx(expected, rel=1e-5)


def test_a_run_resumed_in_the_same_layout_ends_with_the_same_bits(ranks: list[dict[str, Ended]], folder: Path) -> None:
    expected, found = (stored_tensors(folder / name / "iter_0000006") for name in ("first", "second"))
    assert any("exp_avg" in key for key in expected) and expected.keys() == found.keys()
    for key, tensor in expected.items():
        assert torch.equal(tensor, found[key]), key
    assert sorted(path.name for path in (folder / "first").iterdir()) == [
        "iter_0000003", "iter_0000006", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip
    assert (folder / "first" / "latest_checkpointed_iteration.txt").read_text() == "6"


def test_the_learning_rate_follows_the_steps_of_a_run_with_another_batch(ranks: list[dict[str, Ended]]) -> None:
    runs = (ranks[0][name].output.splitlines() for name in ("overlapped", "twice the batch"))
    first, second = ([line.split("learning rate: ")[1][:12] for line in lines if " 5/" in line] for lines in runs)
    assert first == second != []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("another model", ["--num-layers 1", "this run has 2; pass 1"]),
        ("adapters", ["--lora 0", "this run has 4; pass 0"]),
        ("no provider", ["provider='torch' with tensors on cpu", "use provider='auto'"]),
        ("no checkpoint", ["--load", "has no checkpoint"]),
        ("would overwrite", ["--save", "add --load"]),
        ("cannot be written", ["--save /proc/nowhere cannot be written: "]),
        ("no text", ["--text /no/such/file cannot be read"]),
        ("diverges", ["the gradient norm", "--lr"]),
    ],
)
def test_what_a_user_can_put_right_is_refused_on_every_rank(
    ranks: list[dict[str, Ended]], folder: Path, name: str, words: list[str]
) -> None:
    for rank in ranks:
        assert rank[name].exit_code == 2 and "\n" not in rank[name].errors
        for word in words:
            assert word in rank[name].errors
    assert not list((folder / "diverged").glob("*")), "a loss that is not finite is not saved"


def stored_tensors(folder: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, whole."""
    reader = dcp.FileSystemReader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    state: dict[str, object] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def test_the_command_trains_and_refuses_in_one_line() -> None:
    """As a user starts it."""
    first = run_recipe(2, "--overlap-train", "--train-iters", 1)[0]
    assert first.exit_code == 0 and list(first.losses()) == [1], first.errors
    refused = run_recipe(2, "--overlap-train", "--overlap-train-timeout-s", -1)
    assert [rank.exit_code for rank in refused] == [2, 2]
    assert [rank.refusals() for rank in refused] == [
        ["pretrain_gpt: error: timeout_s=-1.0 must be a positive and finite number (--overlap-train-timeout-s)"], [],
    ]  # fmt: skip
    assert not any("Traceback" in rank.errors for rank in refused)


@pytest.mark.parametrize("program", ["pretrain_gpt", "compare_mfu"])
def test_a_missing_package_is_one_line_of_rank_0(program: str) -> None:
    path = RECIPE.with_name(f"{program}.py")
    hidden = f"import runpy, sys; sys.modules['megatron'] = None; sys.path.insert(0, {str(RECIPE.parent)!r})"
    command = [sys.executable, "-c", f"{hidden}; runpy.run_path({str(path)!r}, run_name='__main__')"]
    ended = subprocess.run(command, env={**os.environ, "RANK": "0"}, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith(
        f"{program}: error: Megatron-Core is not installed in this environment: pip install "
    )
