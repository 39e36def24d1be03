"""What the user sees of the steps: lines in the form of Megatron's own training log, and the same figures as files."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpt.program import is_rank_0, say
from gpt.settings import Settings


class IterationLog:
    """One report every `log_interval` steps and one for the last step. Its times are means of the steps since the one before."""

    def __init__(self, settings: Settings, first_iteration: int) -> None:
        self._settings = settings
        self._last = first_iteration
        self._started = time.perf_counter()
        self._files = _Files(settings.tensorboard_dir) if settings.tensorboard_dir and is_rank_0() else None

    def is_due(self, iteration: int) -> bool:
        """Whether there is a report after this step."""
        return iteration % self._settings.log_interval == 0 or iteration == self._settings.train_iters

    def report(self, iteration: int, learning_rate: float, loss: float, grad_norm: float) -> str:
        """The line; rank 0 also writes its figures to `tensorboard_dir`."""
        now = time.perf_counter()
        milliseconds = 1e3 * (now - self._started) / max(1, iteration - self._last)
        self._last, self._started = iteration, now
        batch, steps = self._settings.global_batch_size, self._settings.train_iters
        if self._files is not None:
            tokens_per_s = 1e3 * batch * self._settings.seq_length / milliseconds
            figures = {"loss": loss, "step_ms": milliseconds, "tokens_per_s": tokens_per_s}
            self._files.write(iteration, {**figures, "learning_rate": learning_rate, "grad_norm": grad_norm})
        return (
            f" iteration {iteration:8d}/{steps:8d} | consumed samples: {iteration * batch:12d} |"
            f" elapsed time per iteration (ms): {milliseconds:.1f} | learning rate: {learning_rate:.6E} |"
            f" global batch size: {batch:5d} | lm loss: {loss:.6E} | grad norm: {grad_norm:.3f} |"
            f" time left (s): {milliseconds / 1e3 * (steps - iteration):.0f} |"
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the block (validation, saving) out of the next report's time."""
        began = time.perf_counter()
        yield
        self._started += time.perf_counter() - began


class _Files:
    """metrics.jsonl, and TensorBoard's event files where that package is installed. Both are appended to."""

    def __init__(self, folder: str) -> None:
        self._lines = (Path(folder) / "metrics.jsonl").open("a", buffering=1)
        self._board: Any = None
        if importlib.util.find_spec("tensorboard") is None:
            say(f" --tensorboard-dir {folder}: metrics.jsonl only; for TensorBoard: pip install tensorboard")
            return
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(folder)

    def write(self, iteration: int, figures: dict[str, float]) -> None:
        print(json.dumps({"iteration": iteration, **figures}), file=self._lines)
        if self._board is not None:
            for name, value in figures.items():
                self._board.add_scalar(name, value, iteration)
            self._board.flush()
