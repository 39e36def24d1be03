"""recipes/pretrain_gpt.py for a few steps: equal losses with and without overlap, resumption to the bit, refusals."""

from __future__ import annotations

import io
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gpt.run import make_deterministic
from gpt.settings import Settings
from tests.megatron.recipe_runs import RECIPE, Ended, run_recipe
from tests.processes import run_ranks, values


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, data: Path) -> tuple[Path, Ended]:
    """Six overlapped steps on two ranks, with checkpoints after three and six."""
    folder = tmp_path_factory.mktemp("checkpoints")
    ranks = run_recipe(2, "--overlap-train", "--save", folder, "--save-interval", 3, "--sample-bytes", 4, data=data)
    assert [rank.exit_code for rank in ranks] == [0, 0], ranks[0].errors
    return folder, ranks[0]


def test_a_run_prints_its_losses_beside_the_bigrams_and_a_sample(saved: tuple[Path, Ended]):
    _, first = saved
    assert list(first.losses()) == [1, 2, 3, 4, 5, 6]
    assert first.losses()[6] < first.losses()[1]
    for text in ("validation loss | model ", "| byte bigram ", "sample, 4 bytes", "chunked", "output_layer"):
        assert text in first.output


def test_megatron_alone_has_the_same_losses(saved: tuple[Path, Ended], data: Path):
    first, silent = run_recipe(2, data=data)
    assert first.losses() == pytest.approx(saved[1].losses(), rel=1e-5)
    assert "linear_fc1" not in first.output
    assert silent.output == ""


def test_one_rank_has_the_same_losses(saved: tuple[Path, Ended], data: Path):
    assert run_recipe(1, data=data)[0].losses() == pytest.approx(saved[1].losses(), rel=1e-5)


def test_a_resumed_run_ends_with_the_same_bits(saved: tuple[Path, Ended], data: Path, tmp_path: Path):
    folder, first = saved
    resumed = run_recipe(2, "--overlap-train", "--load", folder / "iter_0000003", "--save", tmp_path, data=data)[0]
    assert resumed.exit_code == 0, resumed.errors
    assert resumed.losses() == {iteration: first.losses()[iteration] for iteration in (4, 5, 6)}
    expected, found = stored_tensors(folder / "iter_0000006"), stored_tensors(tmp_path / "iter_0000006")
    assert expected.keys() == found.keys()
    assert any("exp_avg" in key for key in expected)
    for key, tensor in expected.items():
        assert torch.equal(tensor, found[key]), key


def test_a_checkpoint_with_overlap_loads_without_and_on_one_rank(saved: tuple[Path, Ended], data: Path):
    folder, first = saved
    resumed = run_recipe(1, "--load", folder / "iter_0000003", data=data)[0]
    assert resumed.losses() == pytest.approx({i: first.losses()[i] for i in (4, 5, 6)}, rel=1e-5), resumed.errors


def test_a_truncated_checkpoint_is_refused_on_every_rank(saved: tuple[Path, Ended], data: Path, tmp_path: Path):
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    victim = max((tmp_path / "iter_0000006").iterdir(), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-100])
    first, second = run_recipe(2, "--load", tmp_path, data=data)
    assert_refused(first, second, str(victim), f"--load {tmp_path / 'iter_0000003'}")


def test_a_checkpoint_of_another_model_is_refused(saved: tuple[Path, Ended], data: Path):
    assert_refused(*run_recipe(1, "--load", saved[0], "--num-layers", 2, data=data), "--num-layers 1")


def test_a_missing_text_is_refused_on_every_rank(data: Path):
    assert_refused(*run_recipe(2, "--text", "/no/such/file", data=data), "--text /no/such/file")


def test_flags_that_contradict_each_other_are_refused_on_every_rank(data: Path):
    assert_refused(*run_recipe(2, "--seq-length", 63, data=data), "--seq-length 63", "--tp 2")


def test_overlap_on_one_rank_is_refused(data: Path):
    assert_refused(*run_recipe(1, "--overlap-train", data=data), "tensor_model_parallel_size")


KILLED_IN_ITS_SECOND_SAVE = f"""
import os, runpy, signal, sys
sys.path.insert(0, {str(RECIPE.parent)!r})
import gpt.files
seal = gpt.files.seal
def killed(folder, files):
    return os.kill(os.getpid(), signal.SIGKILL) if folder.name == "iter_0000006.tmp" else seal(folder, files)
gpt.files.seal = killed
runpy.run_path({str(RECIPE)!r}, run_name="__main__")
"""


def test_a_save_killed_half_way_leaves_the_one_before_it(data: Path, tmp_path: Path):
    flags = ("--save", tmp_path, "--save-interval", 3)
    killed = run_recipe(1, *flags, data=data, program=("-c", KILLED_IN_ITS_SECOND_SAVE))[0]
    assert killed.exit_code == -9, killed.errors
    assert (tmp_path / "iter_0000006.tmp").is_dir()
    assert not (tmp_path / "iter_0000006").exists()
    resumed = run_recipe(1, *flags, "--load", tmp_path, data=data)[0]
    assert resumed.exit_code == 0, resumed.errors
    assert list(resumed.losses()) == [4, 5, 6]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000003", "iter_0000006"]


def test_checkpoints_of_another_run_are_not_overwritten(saved: tuple[Path, Ended], data: Path):
    assert_refused(*run_recipe(1, "--save", saved[0], data=data), f"--save {saved[0]}", "--load")


def test_replicas_share_the_samples_of_a_step_and_resume_where_they_were(tmp_path: Path):
    for checks in values(run_ranks(2, check_batches, str(tmp_path))):
        assert checks == {"shares": True, "resumed": True, "padded": 0.0, "ends": 0.0, "positions": True}


def check_batches(rank: int, world: int, folder: str) -> dict[str, object]:
    """Called in each process: facts about the batches of a small data set."""
    from gpt.data import Share, batches, build_datasets
    from gpt.settings import Settings
    from gpt.tokenizer import EOD

    settings = replace(
        Settings(), data_dir=folder, seq_length=64, train_iters=4, global_batch_size=8, micro_batch_size=2, tp=world
    )
    datasets = build_datasets(settings)
    cpu = torch.device("cpu")

    def tokens(first: int, share: Share, count: int) -> torch.Tensor:
        stream = batches(datasets.train, first, settings, share, cpu)
        return torch.stack([next(stream)["tokens"] for _ in range(count)])

    alone = tokens(0, Share(0, 1), 8)
    shared = torch.stack([tokens(0, Share(r, 2), 4) for r in range(2)], dim=1).flatten(0, 1)
    beyond = next(batches(datasets.valid, len(datasets.valid), settings, Share(0, 1), cpu))
    whole = next(batches(datasets.valid, 0, replace(settings, micro_batch_size=len(datasets.valid)), Share(0, 1), cpu))
    return {
        "shares": torch.equal(alone, shared),
        "resumed": torch.equal(alone[4:], tokens(8, Share(0, 1), 4)),
        "padded": float(beyond["loss_mask"].sum()),
        "ends": float(whole["loss_mask"][whole["labels"] == EOD].sum()),
        "positions": torch.equal(whole["tokens"][:, 1:][whole["loss_mask"][:, :-1] > 0], scored(whole)),
    }


def scored(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Labels that count, but for the last of each sample: the tokens that follow."""
    return batch["labels"][:, :-1][batch["loss_mask"][:, :-1] > 0]


def assert_refused(*ranks_and_words: Ended | str) -> None:
    """Every rank exits with 2; rank 0 says why in one line with all the words; nobody prints a traceback."""
    ranks = [item for item in ranks_and_words if isinstance(item, Ended)]
    words = [item for item in ranks_and_words if isinstance(item, str)]
    assert [rank.exit_code for rank in ranks] == [2] * len(ranks), ranks[0].errors
    assert [len(rank.refusals()) for rank in ranks] == [1] + [0] * (len(ranks) - 1)
    for word in words:
        assert word in ranks[0].refusals()[0]
    assert not any("Traceback" in rank.errors for rank in ranks)


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    reader = dcp.FileSystemReader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    state: dict[str, object] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else io.BytesIO()
        for key, entry in stored.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def test_deterministic_means_an_error_and_not_a_warning(monkeypatch: pytest.MonkeyPatch):
    """With warn_only attention's backward goes on adding in the order of arrival."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    try:
        make_deterministic(Settings(deterministic=1))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8", "what the user has set stays"
    finally:
        torch.use_deterministic_algorithms(False)
