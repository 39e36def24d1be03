"""Runs programs on CPU ranks as torchrun would, in processes forked from one that has imported torch.

Importing torch, its compiler and sympy takes a process longer than all that a small program does, and torchrun's agent imports
them, too. Neither Megatron nor overlap_train is imported before the program does it.

Run as a program it is the server: it reads a line of JSON for each program, and answers with a line when all its ranks are done.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from tests.ports import free_ports

_IMPORTED_BY_MEGATRON = (
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "torch._inductor.standalone_compile",
)
_GRACE_S = 10.0  # for the other ranks, after one has failed


class ScriptServer:
    """The side of the tests. What it runs has the environment of this process, without GPUs."""

    def __init__(self) -> None:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=Path(__file__).parents[1],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *program: str, folder: Path, world: int = 2, **variables: str) -> tuple[int, str]:
        """(the highest exit status of the ranks, what they printed).

        program: "-m", MODULE, ... or SCRIPT, ...  folder: the working folder. variables: added to the environment; WORLD_SIZE
        may say more than `world`, whose ranks alone come. A program that has not ended after 200 s is killed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        variables = {"MASTER_PORT": str(free_ports(1)[0]), **variables}
        order = {"program": program, "folder": str(folder), "world": world, "variables": variables}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        status = json.loads(self._process.stdout.readline())
        return status, _output(folder).read_text(errors="replace")

    def close(self) -> None:
        """End the server."""
        self._process.communicate()


def _output(folder: str | Path) -> Path:
    return Path(folder, "output.txt")


def _serve() -> None:
    for module in _IMPORTED_BY_MEGATRON:
        with contextlib.suppress(ImportError):  # another torch may have its private modules elsewhere
            __import__(module)
    gc.collect()
    gc.freeze()  # what is forked would look at all of it for garbage, and so copy every page of it
    for line in sys.stdin:
        print(json.dumps(_run(**json.loads(line))), flush=True)
    os._exit(0)  # Python's own end takes seconds with everything imported


def _run(program: list[str], folder: str, world: int, variables: dict[str, str]) -> int:
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", **variables}
    _output(folder).unlink(missing_ok=True)
    running = {_fork(program, folder, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(world)}
    try:
        return _worst_status(running, time.monotonic() + 200)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _worst_status(running: set[int], end: float) -> int:
    """Wait for processes until `end`; those that have ended are taken out. 124 if some have not."""
    worst = 0
    while running and time.monotonic() < end:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # what it has started
                worst = max(worst, abs(os.waitstatus_to_exitcode(status)))
                end = min(end, time.monotonic() + _GRACE_S) if worst else end
        time.sleep(0.02)
    return worst or (124 if running else 0)


def _fork(program: list[str], folder: str, variables: dict[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        os.chdir(folder)
        output = os.open(_output(folder), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
            os.dup2(file, stream)
        os.environ.update(variables)
        status = _status_of(program)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status_of(program: list[str]) -> int:
    """Run it as Python would, and tell its exit status."""
    is_module = program[0] == "-m"
    name, *arguments = program[1:] if is_module else program
    sys.argv = [name, *arguments]
    sys.path[0] = "" if is_module else str(Path(name).parent)
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve()
