"""Iteration lines have the form of Megatron's own log."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from gpt import progress
from gpt.progress import IterationLog
from gpt.settings import Settings

MEGATRON = re.compile(
    r" iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \| elapsed time per iteration \(ms\): [\d.]+ \|"
    r" learning rate: (\d\.\d{6}E[+-]\d\d) \| global batch size: +(\d+) \| lm loss: (\d\.\d{6}E[+-]\d\d) \|"
    r" grad norm: ([\d.]+) \|"
)


def test_a_line_says_what_megatron_says():
    log = IterationLog(replace(Settings(), train_iters=300, global_batch_size=16), 0)
    match = MEGATRON.match(log.report(10, 1e-3, 2.5, 0.75))
    assert match is not None
    assert match.groups() == ("10", "300", "160", "1.000000E-03", "16", "2.500000E+00", "0.750")


def test_a_line_is_due_at_the_interval_and_at_the_end():
    log = IterationLog(replace(Settings(), train_iters=25, log_interval=10), 0)
    assert [iteration for iteration in range(1, 26) if log.is_due(iteration)] == [10, 20, 25]


def test_a_pause_is_left_out_and_the_steps_before_it_are_not(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr("gpt.progress.time.perf_counter", lambda: now)
    log = IterationLog(replace(Settings(), train_iters=300), 0)
    now += 5.0
    with log.paused():
        now += 60.0
    now += 5.0
    assert "elapsed time per iteration (ms): 1000.0 |" in log.report(10, 1e-3, 2.5, 0.75)


def metrics(folder: Path) -> list[dict[str, float]]:
    """Two reports of ten steps each, ten seconds apart, with --tensorboard-dir."""
    log = IterationLog(replace(Settings(), tensorboard_dir=str(folder), train_iters=20, seq_length=50), 0)
    for iteration, loss in ((10, 3.0), (20, 2.5)):
        log._started -= 10.0
        log.report(iteration, 1e-3, loss, 0.75)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_figures_are_lines_of_json_and_a_missing_tensorboard_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    first, second = metrics(tmp_path)
    assert [first["iteration"], first["loss"], second["iteration"], second["loss"]] == [10, 3.0, 20, 2.5]
    assert second["step_ms"] == pytest.approx(1000.0, rel=0.1)
    assert second["tokens_per_s"] == pytest.approx(16 * 50 / 1.0, rel=0.1)
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "pip install tensorboard" in said


def test_figures_are_scalars_of_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scalars: list[tuple[str, int]] = []
    stand_in = ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = lambda folder: Board()  # type: ignore[attr-defined]

    class Board:
        def add_scalar(self, name: str, value: float, iteration: int) -> None:
            scalars.append((name, iteration))

        def flush(self) -> None: ...

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: object())
    metrics(tmp_path)
    assert {("loss", 10), ("step_ms", 20), ("tokens_per_s", 20)} <= set(scalars)
