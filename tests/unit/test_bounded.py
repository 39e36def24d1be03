"""A library's call that nothing can interrupt ends in time, or its process does; libraries and GPUs are stand-ins."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
import torch

from overlap_train.ranks import bounded as room
from overlap_train.ranks.bounded import Callers, bounded, error_of

CPU = torch.device("cpu")
CALLERS = Callers(6, (4, 6), 0.5)
# PyDLL keeps the GIL in its calls, as nvshmem4py does while it allocates.
PROGRAM = """
import ctypes, importlib.util, os, sys
spec = importlib.util.spec_from_file_location("bounded", sys.argv[1])
bounded = sys.modules["bounded"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bounded)
with bounded.bounded("allocate", bounded.Callers(6, (4, 6), float(sys.argv[2]))):
    exec(sys.argv[3])
print("went on", flush=True)
"""


def run(limit_s: float, call: str) -> subprocess.CompletedProcess[str]:
    """A process that makes a call within a limit. Returns when nobody holds its stderr any more, the watching process neither."""
    command = [sys.executable, "-c", PROGRAM, room.__file__, str(limit_s), call]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("library", ["PyDLL", "CDLL"])  # one keeps the GIL, the other does not
def test_a_call_that_does_not_end_is_named_and_its_process_ended(library: str) -> None:
    ended = run(0.5, f"ctypes.{library}(None).sleep(60)")
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "")
    assert ended.stderr == error_of("allocate", CALLERS) + "\n"


def test_the_error_names_the_call_the_ranks_the_limit_and_the_way_out() -> None:
    error = error_of("allocate", CALLERS)
    for part in (
        "allocate: rank 6 of the job waited 0.5 s",
        "ranks 4, 6 of the job",
        "read the logs of the other ranks",
    ):
        assert part in error
    assert "--overlap-train-timeout-s" in error


def test_a_call_that_ends_is_left_alone_and_nobody_watches_any_more() -> None:
    ended = run(60.0, "pass")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "went on\n", "")
    assert "raised here" in run(60.0, "raise OSError('raised here')").stderr


def test_who_watches_ends_with_a_process_that_dies_in_its_call() -> None:
    assert run(60.0, "os._exit(3)").returncode == 3


def test_another_process_with_the_number_of_one_that_is_gone_is_left_alone() -> None:
    """A fork may hold the watching process's stdin longer than its parent lives."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        command = [sys.executable, room.__file__, str(other.pid), str(time.monotonic()), "late"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as watching:
            assert watching.wait(60) == 0 and watching.stderr is not None and watching.stderr.read() == b""
        assert other.poll() is None
        other.communicate(b"\n")
        assert other.returncode == 0


# As where a program embeds Python, or has lost its own.
@pytest.mark.parametrize("python", [None, "", "/no/such/python"])
def test_a_call_that_nobody_can_watch_goes_on_with_a_warning(
    python: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error here would leave the other ranks alone in the call."""
    monkeypatch.setattr(sys, "executable", python)
    made = []
    with pytest.warns(UserWarning, match="allocate: no process could be started"), bounded("allocate", CALLERS):
        made.append("call")
    assert made
