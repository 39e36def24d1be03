"""Start recipes/pretrain_gpt.py as a user does, one process a rank, and read what it printed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from overlap_train.tools.measure.world import World
from tests.ports import free_ports

RECIPE = Path(__file__).parents[2] / "recipes" / "pretrain_gpt.py"
ROWS = re.compile(r"^ iteration +(\d+)/.* lm loss: (\S+) \|", re.MULTILINE)
SMALL = {
    "--num-layers": 1,
    "--hidden-size": 32,
    "--ffn-hidden-size": 64,
    "--seq-length": 64,
    "--global-batch-size": 8,
    "--micro-batch-size": 4,
    "--train-iters": 6,
    "--lr-warmup-iters": 2,
    "--log-interval": 1,
    "--eval-iters": 2,
    "--sample-bytes": 0,
}


def joined() -> Any:
    """Lets a recipe run in a process that has joined the others already."""
    world = World(dist.group.WORLD, torch.device("cpu"), dist.get_rank(), dist.get_world_size())
    return patch("gpt.program.join", return_value=world)


@dataclass(frozen=True)
class Ended:
    """How one rank ended. exit_code: None if it had to be killed."""

    exit_code: int | None
    output: str
    errors: str

    def losses(self) -> dict[int, float]:
        """lm loss by iteration."""
        return {int(iteration): float(loss) for iteration, loss in ROWS.findall(self.output)}

    def refusals(self) -> list[str]:
        """The recipe's own error lines."""
        return [line for line in self.errors.splitlines() if line.startswith("pretrain_gpt: error: ")]


def run_recipe(ranks: int, *flags: object, program: tuple[str, ...] = (str(RECIPE),)) -> list[Ended]:
    """Train the small model on `ranks` CPU processes; later flags override those of SMALL. At most 150 s."""
    small = [str(word) for pair in SMALL.items() for word in pair]
    command = [sys.executable, *program, *small, *map(str, flags)]
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        # Files and sessions: a killed rank leaves Megatron's queue process behind, which would hold a pipe open.
        logs = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(ranks)]
        processes = [
            _start(command, _variables(rank, ranks, port), *files)
            for rank, files in zip(range(ranks), logs, strict=True)
        ]
        codes = _exit_codes(processes)
        ended = [
            Ended(code, *(file.read_text(errors="replace") for file in files))
            for code, files in zip(codes, logs, strict=True)
        ]
    assert None not in codes, "\n".join(f"rank {rank}: {end}" for rank, end in enumerate(ended))
    return ended


def _exit_codes(processes: list[subprocess.Popen[bytes]], limit_s: float = 150) -> list[int | None]:
    """None for a rank that had to be killed; its stacks are in its errors then."""
    end = time.monotonic() + limit_s
    codes: list[int | None] = []
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        codes = [process.poll() for process in processes]
    finally:
        if None in codes:
            _signal(processes, signal.SIGABRT)  # PYTHONFAULTHANDLER prints the stacks of all threads
            time.sleep(1)
        _signal(processes, signal.SIGKILL)
    return codes


def _signal(processes: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _start(command: list[str], variables: dict[str, str], output: Path, errors: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as out, errors.open("wb") as err:
        return subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=out, stderr=err, start_new_session=True
        )


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONFAULTHANDLER": "1",
    }
