"""Which checkpoint is loaded, which are deleted, and that a run whose loss is not finite saves none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from gpt import checkpoint, run
from gpt.files import listing, publish
from gpt.program import RecipeError
from gpt.settings import Settings


def saved(folder: Path, *iterations: int) -> Path:
    """A folder with a small sealed checkpoint for each of `iterations`; the last one is what the tracker names."""
    for iteration in iterations:
        draft = folder / "draft"
        draft.mkdir(parents=True)
        (draft / "part").write_bytes(b"12345")
        publish(draft, listing(draft), folder / f"iter_{iteration:07d}")
        (folder / checkpoint.TRACKER).write_text(str(iteration))
    return folder


def numbers(folders: list[Path]) -> list[int]:
    return [int(folder.name.removeprefix("iter_")) for folder in folders]


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [30, 40]), (2, [20, 30, 40]), (3, [10, 20, 30, 40]), (0, [5, 10, 20, 30, 40])]
)
def test_the_newest_are_kept_and_those_of_later_steps_too(tmp_path: Path, keep: int, left: list[int]) -> None:
    """Step 40 is of an earlier run, which this one does not continue."""
    folder = saved(tmp_path, 40, 5, 10, 20, 30)
    (folder / "iter_notes").mkdir()
    checkpoint._prune(folder / "iter_0000030", keep)
    assert sorted(numbers(checkpoint._up_to(folder))) == left
    assert (folder / "iter_notes").is_dir()


def test_nothing_is_deleted_after_a_save_that_is_not_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path, 10, 20, 30)
    (folder / "iter_0000030" / "part").write_bytes(b"1234")
    checkpoint._prune(folder / "iter_0000030", 1)
    assert numbers(checkpoint._up_to(folder)) == [30, 20, 10]
    assert "WARNING: older checkpoints are kept" in capsys.readouterr().out


def test_what_the_tracker_names_comes_first_and_later_steps_do_not_come(tmp_path: Path) -> None:
    assert numbers(checkpoint._candidates(saved(tmp_path, 40, 5, 10, 20))) == [20, 10, 5]


def test_a_checkpoint_that_the_tracker_names_and_that_is_gone_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    folder = saved(tmp_path, 5, 10)
    (folder / checkpoint.TRACKER).write_text("20")
    assert numbers(checkpoint._candidates(folder)) == [20, 10, 5]


@pytest.mark.parametrize("tracker", [None, "", "ten"])
def test_without_a_tracker_the_newest_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tracker: str | None
) -> None:
    folder = saved(tmp_path, 5, 10)
    (folder / checkpoint.TRACKER).unlink()
    if tracker is not None:
        (folder / checkpoint.TRACKER).write_text(tracker)
    assert numbers(checkpoint._candidates(folder)) == [10, 5]
    assert capsys.readouterr().out.count("WARNING") == 1


def test_a_checkpoint_that_is_named_is_the_only_one(tmp_path: Path) -> None:
    folder = saved(tmp_path, 5, 10)
    assert checkpoint._candidates(folder / "iter_0000005") == [folder / "iter_0000005"]


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"--load {tmp_path} has no checkpoint"):
        checkpoint._candidates(tmp_path)


@pytest.mark.parametrize(("loss", "grad_norm"), [(float("nan"), 1.0), (2.0, float("inf"))])
def test_a_step_that_is_not_finite_ends_the_run_before_it_is_saved(
    monkeypatch: pytest.MonkeyPatch, loss: float, grad_norm: float
) -> None:
    """Also at a step without a line: good checkpoints would be deleted after bad ones."""
    trainer: Any = SimpleNamespace(
        settings=Settings(save="folder", save_interval=1, log_interval=10),
        rehearse=lambda device: None,
        learning_rate=lambda: 1e-3,
        step=lambda data: (torch.zeros(2), grad_norm),
        model=SimpleNamespace(bare=None),
    )
    monkeypatch.setattr(run, "batches", lambda *_: iter(()))
    monkeypatch.setattr(run, "data_share", lambda: None)
    monkeypatch.setattr(run, "per_byte", lambda total: loss)
    monkeypatch.setattr(run.checkpoint, "save", lambda *_: pytest.fail("saved"))
    with pytest.raises(RecipeError, match=f"the loss is {loss} and the gradient norm {grad_norm} at iteration 1"):
        run.train(trainer, SimpleNamespace(train=None), 0, torch.device("cpu"))  # type: ignore[arg-type]
