"""What brackets a call of an operator: one thread at a time, free slots before, finished pushes and checked waits after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..protocol.tags import Tag

if TYPE_CHECKING:
    from .domain import OverlapDomain


def _take(lock: Any, name: str) -> None:
    if not lock.acquire(blocking=False):
        raise RuntimeError(
            f"{name}: another thread of this process is in an operator of the same group; the ranks' calls of a "
            f"group need one order: call from one thread, or give each thread a group of its own"
        )


class Exclusively:
    """OverlapDomain.exclusively."""

    def __init__(self, lock: Any, name: str) -> None:
        self._lock, self._name = lock, name

    def __enter__(self) -> None:
        _take(self._lock, self._name)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Operator:
    """OverlapDomain.operator; not a generator, which would take 2 microseconds more."""

    def __init__(self, domain: OverlapDomain, tag: Tag, slots: int, barrier_first: bool) -> None:
        self._domain, self._tag, self._slots, self._barrier_first = domain, tag, slots, barrier_first

    def __enter__(self) -> None:
        domain = self._domain
        domain.fault.check()
        _take(domain.in_use, self._tag.op)
        try:
            domain.engine.begin()
            if self._slots:
                domain.workspace.begin(self._tag, self._slots, self._barrier_first)
        except BaseException:
            self.__exit__(True)
            raise

    def __exit__(self, raised: object, *_: object) -> None:
        domain = self._domain
        try:
            domain.engine.join()  # whatever was raised, pushes must not outlive the operator: the next call resets their counters
            if raised is not None and self._slots:
                if domain.workspace.use.is_ahead:
                    domain.engine.join()
                domain.workspace.use.invalidate()
        finally:
            domain.in_use.release()
        if raised is None:
            domain.fault.check()
