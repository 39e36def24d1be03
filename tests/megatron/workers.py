"""Two CPU processes over gloo that run one test function after another.

They are forked from a process that has imported torch, import Megatron-Core themselves, and live as long as the test session. A
function that fails or does not return in time takes its processes with it; the next call starts new ones.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.processes import join

WORLD = 2
_START_LIMIT_S = 200.0  # two imports of torch and Megatron-Core, where other tests run beside them


class Workers:
    """`call(function, *args)` runs a module-level function on all ranks and returns what each of them returned."""

    def __init__(self) -> None:
        self._processes: list[mp.Process] = []
        self._pipes: list[Connection] = []

    def call(self, function: Callable[..., Any], *args: Any, limit_s: float = 60.0) -> list[Any]:
        """Raises AssertionError with the rank's traceback if one fails, or if one has not returned after limit_s
        seconds."""
        if not self._processes:
            self._start()
            self._answers(_START_LIMIT_S)
        for pipe in self._pipes:
            pipe.send((function, args))
        return self._answers(limit_s)

    def _answers(self, limit_s: float) -> list[Any]:
        failures, results = [], []
        deadline = time.monotonic() + limit_s
        for rank, pipe in enumerate(self._pipes):
            failure, result = self._receive(pipe, deadline)
            failures += [] if failure is None else [f"rank {rank}: {failure}"]
            results.append(result)
        if failures:
            self._kill()
            raise AssertionError("\n".join(failures))
        return results

    def stop(self) -> None:
        """End the processes; those that have not gone after ten seconds are killed."""
        _end_children(self._processes)
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
        self._kill()

    def _receive(self, pipe: Connection, deadline: float) -> tuple[str | None, Any]:
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                return pipe.recv()
        except EOFError:
            return "the process has died", None
        return "no answer within the time limit", None

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.preloaded"])
        # Kept here: a port that a rank opened later could be somebody else's by then.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # These tests run on the CPU on every machine.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        for rank in range(WORLD):
            mine, theirs = context.Pipe()
            # Not daemons: saving a checkpoint starts processes of its own, which a daemon may not.
            process = context.Process(target=_serve, args=(rank, self._store.port, theirs, environment))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def _kill(self) -> None:
        _end_children(self._processes)
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def on_ranks(body: Callable[..., None]) -> Callable[..., None]:
    """A test whose body runs on all ranks. Its parameters are pytest's, and are sent to them."""

    def test(workers: Workers, **arguments: Any) -> None:
        workers.call(_call, body.__module__, body.__name__, arguments)

    mine = inspect.Parameter("workers", inspect.Parameter.KEYWORD_ONLY)
    test.__signature__ = inspect.Signature([*inspect.signature(body).parameters.values(), mine])  # type: ignore[attr-defined]
    test.__name__, test.__doc__, test.body = body.__name__, body.__doc__, body  # type: ignore[attr-defined]
    return test


def _call(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).body(**arguments)


def _end_children(ranks: list[mp.Process]) -> None:
    """Kill what the ranks have started: Megatron's checkpoint writers, which would outlive them."""
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(rank.pid).children(recursive=True):
                child.kill()


def _serve(rank: int, port: int, pipe: Connection, environment: dict[str, str]) -> None:
    join(rank, WORLD, port, environment)
    from tests.megatron.layout import leave, prepare

    prepare()
    gc.freeze()  # nobody looks at what is imported for garbage again
    pipe.send((None, None))  # started
    while (work := _next(pipe)) is not None:
        function, args = work
        try:
            pipe.send((None, function(*args)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
    leave()
    dist.destroy_process_group()
    os._exit(0)  # Python's own end takes five seconds with everything imported, and there is nothing left to free


def _next(pipe: Connection) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    try:
        return pipe.recv()
    except EOFError:  # the test session is gone
        return None
