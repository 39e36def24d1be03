"""Runs programs as `python -m MODULE ...` or `python SCRIPT ...` would, in processes forked from one that has imported torch.

Importing torch, its compiler and sympy takes a process longer than all that a small script does. Megatron is not imported here:
under our launcher the script decides when that happens.

Run as a script it is the server: it reads a line of JSON for each program, and answers with a line when all its ranks have ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

_IMPORTED_BY_MEGATRON = ("torch", "torch.distributed.tensor", "torch._dynamo", "torch._inductor.standalone_compile")
_GRACE_S = 10.0  # for the other ranks, after one has failed


class ScriptServer:
    """The side of the tests. `environment` is that of the server and of all it runs."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, world: int, program: list[str], folder: Path, limit_s: float, **variables: str) -> tuple[int, str]:
        """(the highest exit status of the ranks, what they printed). program: ["-m", MODULE, ...] or [SCRIPT, ...]."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"world": world, "program": program, "folder": str(folder), "limit_s": limit_s, "variables": variables}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        status = json.loads(self._process.stdout.readline())
        return status, (folder / "output.txt").read_text(errors="replace")

    def close(self) -> None:
        """End the server; nothing that it has started is left by then."""
        self._process.communicate()


def _serve() -> None:
    for module in _IMPORTED_BY_MEGATRON:
        __import__(module)
    for line in sys.stdin:
        print(json.dumps(_run(**json.loads(line))), flush=True)
    os._exit(0)  # Python's own end takes seconds with everything imported


def _run(world: int, program: list[str], folder: str, limit_s: float, variables: dict[str, str]) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(variables, WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    (Path(folder) / "output.txt").unlink(missing_ok=True)
    running = {_fork(rank, program, folder) for rank in range(world)}
    end, worst = time.monotonic() + limit_s, 0
    try:
        while running and time.monotonic() < end:
            status = _ended(running)
            if status:
                end = min(end, time.monotonic() + _GRACE_S)
            worst = max(worst, status)
        return worst if not running else worst or 124
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _ended(running: set[int]) -> int:
    """The exit status of a process that has ended meanwhile, which is taken out; 0 if none has."""
    for pid in running:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            running.remove(pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what it has started
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
    time.sleep(0.05)
    return 0


def _fork(rank: int, program: list[str], folder: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        os.chdir(folder)
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
            os.dup2(file, stream)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
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
