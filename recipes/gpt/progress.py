"""What the user sees: rank 0 prints, in the form of Megatron's own training log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from gpt.settings import Settings


def say(text: str) -> None:
    """Print one line from rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


class IterationLog:
    """Megatron's iteration lines, one every `log_interval` steps and one for the last."""

    def __init__(self, settings: Settings, first_iteration: int) -> None:
        self._settings = settings
        self._last = first_iteration
        self._started = time.perf_counter()

    def is_due(self, iteration: int) -> bool:
        """Whether a line belongs behind this step."""
        return iteration % self._settings.log_interval == 0 or iteration == self._settings.train_iters

    def line(self, iteration: int, learning_rate: float, loss: float, grad_norm: float) -> str:
        """The line; the time is the mean of the steps since the last one."""
        now = time.perf_counter()
        milliseconds = 1e3 * (now - self._started) / max(1, iteration - self._last)
        self._last, self._started = iteration, now
        left = milliseconds / 1e3 * (self._settings.train_iters - iteration)
        batch = self._settings.global_batch_size
        return (
            f" iteration {iteration:8d}/{self._settings.train_iters:8d} | consumed samples: {iteration * batch:12d} |"
            f" elapsed time per iteration (ms): {milliseconds:.1f} | learning rate: {learning_rate:.6E} |"
            f" global batch size: {batch:5d} | lm loss: {loss:.6E} | grad norm: {grad_norm:.3f} |"
            f" time left (s): {left:.0f} |"
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what is done inside (validation, saving) out of the next line's time."""
        began = time.perf_counter()
        yield
        self._started += time.perf_counter() - began
