"""Questions to the job's key-value store: answered in time, or given up.

torch waits without end for a store whose process is stopped, whatever time-out the store has: torch 2.11 waited 25 s, until the
process went on, for one with a time-out of 5. Where the process is dead, torch raises at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def answer(ask: Callable[[], T], limit_s: float) -> T:
    """What `ask` returns or raises. It runs in a thread of its own, which is left behind where no answer comes.

    Raises:
        TimeoutError: no answer came in time.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(ask())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, name="overlap_train store", daemon=True).start()
    except RuntimeError:  # no thread can be started: none in functions of atexit, from Python 3.12 on
        return ask()
    return future.result(limit_s)
