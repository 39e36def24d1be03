"""The brackets around an operator: one thread at a time; before it slots are free, after it pushes are done and waits checked."""

from __future__ import annotations

import threading
from typing import Protocol

from ..protocol.copy_engine import CopyEngine
from ..protocol.tags import Tag
from ..protocol.watchdog import FaultRecord
from ..protocol.workspace import Workspace
from .profiling import OUTSIDE, is_profiling, profiled


class Domain(Protocol):
    """What brackets need of an OverlapDomain. They look it up each time: the engine is replaced when nodes are connected, the
    workspace when memory grows."""

    engine: CopyEngine
    workspace: Workspace
    fault: FaultRecord
    in_use: threading.RLock

    def check_usable(self, tag: Tag, slots: int) -> None:
        """Raise RuntimeError where an operator cannot run now."""


def _another_thread(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name}: another thread of this process is in an operator of the same group; the ranks' calls of a "
        f"group need one order: call from one thread, or give each thread a group of its own"
    )


class Exclusively:
    """The bracket that OverlapDomain.exclusively returns. Raises RuntimeError while another thread is in an operator."""

    def __init__(self, lock: threading.RLock, name: str) -> None:
        self._lock, self._name = lock, name

    def __enter__(self) -> None:
        if not self._lock.acquire(False):
            raise _another_thread(self._name)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Idle:
    """A bracket in which no operator of a group is under way, and none begins in another thread.

    Raises RuntimeError while one is, also in this thread, where a signal handler runs in the middle of whatever was interrupted:
    what the operator goes on with would be gone, and its pushes would wait without end for a copy engine that has ended.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if self._lock._is_owned() or not self._lock.acquire(False):  # type: ignore[attr-defined]
            raise RuntimeError(
                "shutdown: an operator is under way, in another thread or, where a signal handler calls shutdown, in this one; "
                "call it when the operator has returned"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Operator:
    """The bracket that OverlapDomain.operator returns. As a generator it would take 2 microseconds more. A linear keeps its
    bracket, which saves another one."""

    def __init__(self, domain: Domain, tag: Tag, slots: int, barrier_first: bool, shown_as: str) -> None:
        self._domain, self._tag, self._slots, self._barrier_first = domain, tag, slots, barrier_first
        self._shown_as, self._range = shown_as, OUTSIDE

    def __enter__(self) -> None:
        domain, slots = self._domain, self._slots
        domain.check_usable(self._tag, slots)
        domain.fault.check()
        if not domain.in_use.acquire(False):
            raise _another_thread(self._tag.op)
        try:
            domain.engine.begin()
            if slots:
                domain.workspace.begin(self._tag, slots, self._barrier_first)
            if self._shown_as and is_profiling():
                self._range = profiled(self._shown_as)
                self._range.__enter__()
        except BaseException:
            self.__exit__(True)
            raise

    def __exit__(self, raised: object, *_: object) -> None:
        domain = self._domain
        if self._range is not OUTSIDE:
            self._range, ended = OUTSIDE, self._range
            ended.__exit__(None, None, None)
        try:
            domain.engine.join()  # whatever was raised: pushes must not outlive the operator, the next one resets their counters
            if raised is not None and self._slots:
                if domain.workspace.use.is_ahead:
                    domain.engine.join()
                domain.workspace.use.invalidate()
        finally:
            domain.in_use.release()
        if raised is None:
            domain.fault.check()
