"""Real CPU processes for tests: one per rank, gloo between them, a time limit, and what each of them raised."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any


@dataclass
class Outcome:
    """What one rank ended with: a value, or the class name and text of what it raised, or neither if it was killed."""

    value: Any = None
    error: str | None = None
    exit_code: int | None = None


def run_ranks(
    world: int, body: Callable[..., Any], *args: Any, limit_s: float = 120.0, grace_s: float = 120.0
) -> list[Outcome]:
    """Run `body(rank, world, *args)` in `world` fresh processes with a gloo group.

    `body` must be importable (module level). Never takes longer than `limit_s`, nor than `grace_s` after the first rank has
    ended. A process that is still there then is killed and has neither value nor error.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            context.Process(target=_enter, args=(rank, world, f"{folder}/store", pipes[rank][1], body, args))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        outcomes = _collect([receiver for receiver, _ in pipes], limit_s, grace_s)
        for process, outcome in zip(processes, outcomes, strict=True):
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
            outcome.exit_code = process.exitcode
    return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """The ranks' values; fails with the first rank's traceback if any rank did not return."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None and outcome.exit_code == 0, f"rank {rank}: {outcome.error or outcome.exit_code}"
    return [outcome.value for outcome in outcomes]


def _collect(receivers: list[Connection], limit_s: float, grace_s: float) -> list[Outcome]:
    outcomes = [Outcome() for _ in receivers]
    deadline = time.monotonic() + limit_s
    open_ones = dict(zip(receivers, outcomes, strict=True))
    while open_ones and (left := deadline - time.monotonic()) > 0:
        for receiver in wait(list(open_ones), timeout=left):
            outcome = open_ones.pop(receiver)  # type: ignore[call-overload]
            with contextlib.suppress(EOFError):  # killed before it could report
                outcome.value, outcome.error = receiver.recv()  # type: ignore[union-attr]
            deadline = min(deadline, time.monotonic() + grace_s)
    return outcomes


def _enter(
    rank: int, world: int, store: str, pipe: Connection, body: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        pipe.send((body(rank, world, *args), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    pipe.close()
    os._exit(0)  # no orderly shutdown: a test may have left peers dead or stopped
