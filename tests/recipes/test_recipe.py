"""recipes/pretrain_gpt.py for a few steps: equal losses with and without overlap, resumption to the bit, refusals."""

from __future__ import annotations

import io
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gpt.data import Samples, Share, batches
from gpt.files import damage
from gpt.run import make_deterministic
from gpt.settings import Settings
from tests.recipes.recipe_runs import RECIPE, Ended, run_recipe


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """Six overlapped steps on two ranks, with checkpoints after three and six."""
    folder = tmp_path_factory.mktemp("checkpoints")
    ranks = run_recipe(2, "--overlap-train", "--save", folder, "--save-interval", 3, "--sample-bytes", 4)
    assert [rank.exit_code for rank in ranks] == [0, 0], ranks[0].errors
    return folder, ranks[0]


def test_a_run_prints_its_losses_beside_the_bigrams_and_a_sample(saved: tuple[Path, Ended]):
    _, first = saved
    assert list(first.losses()) == [1, 2, 3, 4, 5, 6]
    assert first.losses()[6] < first.losses()[1]
    for text in ("validation loss | model ", "| byte bigram ", "sample, 4 bytes", "chunked", "output_layer"):
        assert text in first.output


def test_megatron_alone_has_the_same_losses(saved: tuple[Path, Ended]):
    first, silent = run_recipe(2)
    assert first.losses() == pytest.approx(saved[1].losses(), rel=1e-5)
    assert "linear_fc1" not in first.output
    assert silent.output == ""


def test_one_rank_has_the_same_losses(saved: tuple[Path, Ended]):
    assert run_recipe(1)[0].losses() == pytest.approx(saved[1].losses(), rel=1e-5)


def test_a_resumed_run_ends_with_the_same_bits(saved: tuple[Path, Ended], tmp_path: Path):
    folder, first = saved
    resumed = run_recipe(2, "--overlap-train", "--load", folder / "iter_0000003", "--save", tmp_path)[0]
    assert resumed.exit_code == 0, resumed.errors
    assert resumed.losses() == {iteration: first.losses()[iteration] for iteration in (4, 5, 6)}
    expected, found = stored_tensors(folder / "iter_0000006"), stored_tensors(tmp_path / "iter_0000006")
    assert expected.keys() == found.keys()
    assert any("exp_avg" in key for key in expected)
    for key, tensor in expected.items():
        assert torch.equal(tensor, found[key]), key


def test_a_checkpoint_with_overlap_loads_without_and_on_one_rank(saved: tuple[Path, Ended]):
    folder, first = saved
    resumed = run_recipe(1, "--load", folder / "iter_0000003")[0]
    assert resumed.losses() == pytest.approx({i: first.losses()[i] for i in (4, 5, 6)}, rel=1e-5), resumed.errors


def damaged_copy(saved: Path, folder: Path, *names: str) -> list[Path]:
    """Copy a folder of checkpoints and cut the largest file of those named; returns these files."""
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    victims = [max((folder / name).iterdir(), key=lambda path: path.stat().st_size) for name in names]
    for victim in victims:
        victim.write_bytes(victim.read_bytes()[:-100])
    return victims


def test_the_learning_rate_follows_the_steps_of_a_run_with_another_batch(saved: tuple[Path, Ended]):
    """As its note says: else it would lag behind for the rest of the run."""
    rate = re.compile(r"^ iteration +5/.* learning rate: (\S+) ", re.MULTILINE)
    flags = ("--load", saved[0] / "iter_0000003", "--global-batch-size", 16)
    resumed = run_recipe(1, *flags)[0]
    assert "note: --tp, --global-batch-size changed" in resumed.output
    assert rate.findall(resumed.output) == rate.findall(saved[1].output) != []


def test_a_damaged_checkpoint_is_skipped_and_the_one_before_it_loaded(saved: tuple[Path, Ended], tmp_path: Path):
    (victim,) = damaged_copy(saved[0], tmp_path, "iter_0000006")
    flags = ("--overlap-train", "--load", tmp_path, "--save", tmp_path, "--sample-bytes", 4)
    first, second = run_recipe(2, *flags)
    assert first.exit_code == second.exit_code == 0, first.errors
    (warning,) = [line for line in first.output.splitlines() if "WARNING" in line]
    assert str(victim) in warning and f"{tmp_path / 'iter_0000006'} is damaged and is skipped" in warning
    assert f"resumed from checkpoint {tmp_path / 'iter_0000003'}" in first.output
    assert first.losses() == {iteration: saved[1].losses()[iteration] for iteration in (4, 5, 6)}
    assert damage(tmp_path / "iter_0000006") == "", "saved anew"


def test_without_a_good_checkpoint_every_rank_refuses(saved: tuple[Path, Ended], tmp_path: Path):
    damaged_copy(saved[0], tmp_path, "iter_0000006", "iter_0000003")
    assert_refused(*run_recipe(2, "--load", tmp_path), f"--load {tmp_path} has no good checkpoint", "iter_0000003")


def test_a_checkpoint_of_another_model_is_refused(saved: tuple[Path, Ended]):
    assert_refused(*run_recipe(1, "--load", saved[0], "--num-layers", 2), "--num-layers 1")


def test_a_missing_text_is_refused_on_every_rank():
    assert_refused(*run_recipe(2, "--text", "/no/such/file"), "--text /no/such/file")


@pytest.mark.parametrize("name", ["--save", "--tensorboard-dir"])
def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path: Path, name: str):
    (tmp_path / "file").write_text("")
    first, second = run_recipe(2, name, tmp_path / "file" / "folder")
    assert_refused(first, second, f"{name} {tmp_path / 'file' / 'folder'} cannot be written")
    assert first.losses() == {}


def test_flags_that_contradict_each_other_are_refused_on_every_rank():
    assert_refused(*run_recipe(2, "--seq-length", 63), "--seq-length 63", "--tp 2")


def test_overlap_on_one_rank_is_refused():
    assert_refused(*run_recipe(1, "--overlap-train"), "tensor_model_parallel_size")


KILLED_IN_ITS_SECOND_SAVE = f"""
import os, runpy, signal, sys
sys.path.insert(0, {str(RECIPE.parent)!r})
import gpt.files
publish = gpt.files.publish
def killed(draft, files, folder):
    return os.kill(os.getpid(), signal.SIGKILL) if draft.name == "iter_0000006.tmp" else publish(draft, files, folder)
gpt.files.publish = killed
runpy.run_path({str(RECIPE)!r}, run_name="__main__")
"""


def test_a_save_killed_half_way_leaves_the_one_before_it(tmp_path: Path):
    flags = ("--save", tmp_path, "--save-interval", 3)
    killed = run_recipe(1, *flags, program=("-c", KILLED_IN_ITS_SECOND_SAVE))[0]
    assert killed.exit_code == -9, killed.errors
    assert (tmp_path / "iter_0000006.tmp").is_dir()
    assert not (tmp_path / "iter_0000006").exists()
    resumed = run_recipe(1, *flags, "--load", tmp_path)[0]
    assert resumed.exit_code == 0, resumed.errors
    assert list(resumed.losses()) == [4, 5, 6]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000003", "iter_0000006"]


FULL_DISK = f"""
import resource, runpy, sys
sys.path.insert(0, {str(RECIPE.parent)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
runpy.run_path({str(RECIPE)!r}, run_name="__main__")
"""


def test_a_full_disk_is_one_line(tmp_path: Path):
    ranks = run_recipe(2, "--save", tmp_path, "--save-interval", 3, program=("-c", FULL_DISK))
    assert_refused(*ranks, f"--save {tmp_path} cannot be written", "GiB of disk are free")
    assert not list(tmp_path.glob("latest*"))


def test_the_newest_checkpoints_are_kept(tmp_path: Path):
    flags = ("--save", tmp_path, "--save-interval", 1, "--keep-checkpoints", 2)
    first = run_recipe(1, *flags, "--train-iters", 4)[0]
    assert first.exit_code == 0, first.errors
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000003", "iter_0000004"]


def test_checkpoints_of_another_run_are_not_overwritten(saved: tuple[Path, Ended]):
    assert_refused(*run_recipe(1, "--save", saved[0]), f"--save {saved[0]}", "--load")


def test_replicas_share_the_samples_of_a_step_and_resume_where_they_were():
    """In every micro-batch, also the last of a part of the text, every label is the token after."""
    settings, cpu = Settings(seq_length=8, micro_batch_size=2, global_batch_size=8), torch.device("cpu")
    text = np.random.default_rng(0).integers(256, size=99, dtype=np.uint8)
    shuffled, once = Samples(text, 8, seed=1), Samples(text, 8)

    def tokens(first: int, share: Share, count: int) -> torch.Tensor:
        stream = batches(shuffled, first, settings, share, cpu)
        return torch.stack([next(stream)["tokens"] for _ in range(count)])

    alone = tokens(0, Share(0, 1), 8)
    shared = torch.stack([tokens(0, Share(rank, 2), 4) for rank in range(2)], dim=1).flatten(0, 1)
    assert torch.equal(alone, shared)
    assert torch.equal(alone[4:], tokens(8, Share(0, 1), 4))
    (last,) = [next(batches(once, 11, settings, Share(0, 1), cpu))]
    assert last["loss_mask"].tolist() == [[1.0] * 8, [0.0] * 8]
    assert last["tokens"][0].tolist() == text[88:96].tolist()
    assert last["labels"][0].tolist() == text[89:97].tolist()
    assert last["position_ids"].tolist() == [list(range(8))] * 2


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
