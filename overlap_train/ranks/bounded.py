"""A call into a library that may wait without end, and that nothing can interrupt: it ends in time, or this process does.

NVSHMEM, NCCL and torch wait without end for a rank that dies or stops after the ranks have agreed to make such a call. Another
process watches, because a thread could not: nvshmem4py 0.4.1 keeps the GIL while it allocates, frees and finalizes. The watching
process runs this file as a program, so the file imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Callers:
    """The ranks that make a call together. rank: this one; ranks: all of them; both as numbers of the job. limit_s: how long a
    call may take."""

    rank: int
    ranks: tuple[int, ...]
    limit_s: float


@contextlib.contextmanager
def bounded(what: str, callers: Callers) -> Iterator[None]:
    """Scope of one call that all callers make. If it has not ended in time, the process ends, with an error on stderr, by
    SIGKILL, which no state of it can hold up. Where nobody can watch, a warning says so. Takes this process 2 ms. what: what
    the ranks do here, and in which library: "overlap_train: allocate NVSHMEM memory"."""
    watching, deadline = None, time.monotonic() + callers.limit_s  # the same clock in all processes of a machine
    python = sys.executable or ""  # it may be None in a program that embeds Python: OSError then, too
    command = [python, "-I", "-S", __file__, str(os.getpid()), str(deadline), error_of(what, callers)]
    try:
        # A session of its own: Ctrl-C reaches this process, whose end it notices.
        watching = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    except OSError as failure:  # too many processes, or no Python that could be started
        from ..warn import warn_user  # not above: who watches runs this file alone

        warn_user(
            f"{what}: no process could be started to watch this call ({failure}); if another rank dies or stops in it, this one "
            f"waits without end"
        )
    try:
        yield
    finally:
        if watching is not None:
            watching.kill()
            watching.communicate()


def error_of(what: str, callers: Callers) -> str:
    ranks = ", ".join(map(str, callers.ranks))
    return (
        f"{what}: rank {callers.rank} of the job waited {callers.limit_s:g} s in a call that ranks {ranks} of the job make "
        f"together, and that nothing can interrupt. Therefore its process is ended here (SIGKILL). A rank that does not come is "
        f"dead, stopped, or in another call: read the logs of the other ranks first; if it is only slow, raise timeout_s "
        f"(--overlap-train-timeout-s)."
    )


def watch_process(process: int, deadline: float, error: str) -> None:
    """End a process that is still this one's parent at the deadline of time.monotonic(). Return once it has ended by itself."""
    left = max(0.0, deadline - time.monotonic())
    has_ended = select.select([0], [], [], left)[0]  # stdin ends with the parent
    # A fork of the parent may hold the other end of stdin, and a number of a process that is gone may be another's.
    if not has_ended and os.getppid() == process:
        with contextlib.suppress(OSError):
            os.write(2, f"{error}\n".encode())
        os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    watch_process(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
