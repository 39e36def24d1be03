"""After a wait that gave up: nothing that may hold NaN becomes the last good checkpoint, and the error names the wait."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core")

from gpt import checkpoint, run
from gpt.settings import Settings
from overlap_train import OverlapTimeoutError


def give_up() -> None:
    raise OverlapTimeoutError("fc1: rank 0 waited 60 s for chunk 0 of rank 1")


def test_a_save_behind_a_wait_that_gave_up_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(checkpoint.dist_checkpointing, "save", lambda state, path: written.append(path))
    monkeypatch.setattr(checkpoint, "_state", lambda trainer, is_loading: {})
    monkeypatch.setattr(checkpoint, "on_rank_0", lambda work, target="": work())
    monkeypatch.setattr(checkpoint.overlap_train, "check", give_up)
    trainer = SimpleNamespace(settings=Settings(save=str(tmp_path)))
    with pytest.raises(OverlapTimeoutError):
        checkpoint.save(trainer, 7, "text")  # type: ignore[arg-type]
    assert written and not (tmp_path / checkpoint.TRACKER).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000007.tmp"]


def test_training_stops_at_the_step_whose_wait_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the loss, which would blame the learning rate."""
    steps: list[int] = []
    trainer = SimpleNamespace(
        settings=SimpleNamespace(global_batch_size=1, train_iters=3, log_interval=1),
        rehearse=lambda device: None,
        learning_rate=lambda: 1e-3,
        step=lambda data: steps.append(1) or (None, 0.0),
    )
    monkeypatch.setattr(run, "batches", lambda *_: iter(()))
    monkeypatch.setattr(run, "data_share", lambda: None)
    monkeypatch.setattr(run, "IterationLog", lambda *_: None)
    monkeypatch.setattr(run.overlap_train, "check", give_up)
    with pytest.raises(OverlapTimeoutError):
        run.train(trainer, SimpleNamespace(train=None), 0, None)  # type: ignore[arg-type]
    assert len(steps) == 1
