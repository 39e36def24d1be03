"""Iteration lines have the form of Megatron's own log."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gpt.progress import IterationLog
from gpt.settings import Settings

MEGATRON = re.compile(
    r" iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \| elapsed time per iteration \(ms\): [\d.]+ \|"
    r" learning rate: (\d\.\d{6}E[+-]\d\d) \| global batch size: +(\d+) \| lm loss: (\d\.\d{6}E[+-]\d\d) \|"
    r" grad norm: ([\d.]+) \|"
)


def test_a_line_says_what_megatron_says():
    log = IterationLog(replace(Settings(), train_iters=300, global_batch_size=16), 0)
    match = MEGATRON.match(log.line(10, 1e-3, 2.5, 0.75))
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
    assert "elapsed time per iteration (ms): 1000.0 |" in log.line(10, 1e-3, 2.5, 0.75)
