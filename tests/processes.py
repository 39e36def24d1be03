"""Real CPU processes for tests: one per rank, gloo between them, a time limit, and what each of them raised."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
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
    """Run `body(rank, world, *args)` in `world` fresh processes with a gloo group and this process's environment.

    `body` must be importable (module level). Never takes longer than `limit_s`, nor than `grace_s` after the first rank has
    ended, nor longer than the ranks that nobody has stopped. A process that is still there then is killed and has neither
    value nor error.
    """
    import torch.distributed as dist

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    work = pickle.dumps((body, args))  # unpickled where the environment is set already: modules read it when imported
    # Hosted here, as torchrun's agent does: it outlives every rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(target=_enter, args=(rank, world, store.port, pipes[rank][1], work, dict(os.environ)))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    outcomes = _collect([receiver for receiver, _ in pipes], processes, limit_s, grace_s)
    for process, outcome in zip(processes, outcomes, strict=True):
        process.join(0 if _is_stopped(process) else 2)
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


def refusal(call: Callable[..., object], *told: Any, **named: Any) -> str:
    """What the ValueError says that this call raises."""
    try:
        call(*told, **named)
    except ValueError as error:
        return str(error)
    raise AssertionError("it raised nothing")


def failed_checks(checks: dict[str, Callable[[], object]]) -> dict[str, str]:
    """The tracebacks of those that raise, by name: of many checks that share processes which took long to start."""
    failed = {}
    for name, check in checks.items():
        try:
            check()
        except BaseException:
            failed[name] = traceback.format_exc()
    return failed


def _collect(
    receivers: list[Connection], processes: list[BaseProcess], limit_s: float, grace_s: float
) -> list[Outcome]:
    outcomes = [Outcome() for _ in receivers]
    deadline = time.monotonic() + limit_s
    open_ones = dict(zip(receivers, zip(outcomes, processes, strict=True), strict=True))
    while open_ones and (left := deadline - time.monotonic()) > 0:
        ready = wait(list(open_ones), timeout=min(left, 0.5))
        if not ready and all(_is_stopped(process) for _, process in open_ones.values()):
            break
        for receiver in ready:
            outcome, _ = open_ones.pop(receiver)  # type: ignore[call-overload]
            with contextlib.suppress(EOFError):  # killed before it could report
                outcome.value, outcome.error = receiver.recv()  # type: ignore[union-attr]
            deadline = min(deadline, time.monotonic() + grace_s)
    return outcomes


def _is_stopped(process: BaseProcess) -> bool:
    """By SIGSTOP: it will not report. False for one that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def join(rank: int, world: int, port: int, environment: dict[str, str]) -> None:
    """Make this fresh process a rank with that environment."""
    os.environ.clear()
    os.environ.update(environment)
    from tests import preloaded

    preloaded.load_for_this_environment()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))


def _enter(rank: int, world: int, port: int, pipe: Connection, work: bytes, environment: dict[str, str]) -> None:
    join(rank, world, port, environment)
    try:
        body, args = pickle.loads(work)
        pipe.send((body(rank, world, *args), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    pipe.close()
    for child in multiprocessing.active_children():
        child.kill()  # Megatron's checkpoint writers, which would outlive the rank
    os._exit(0)  # no orderly shutdown: a test may have left peers dead or stopped
