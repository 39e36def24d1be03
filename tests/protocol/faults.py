"""Faults to plant in the real source. Each names the text it changes, so a fault that no longer fits the source fails loudly."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from tests.protocol.mutation import planted


@dataclass(frozen=True)
class Fault:
    """One textual change of one module of the package, and what the scheduler has to say about it (a regular expression)."""

    module: str
    old: str
    new: str
    report: str = "wrong result"
    reload: tuple[str, ...] = ()

    def planted(self) -> AbstractContextManager[None]:
        """Inside, the package runs with the fault."""
        reload = tuple(f"overlap_train.{name}" for name in self.reload)
        return planted(f"overlap_train.{self.module}", self.old, self.new, reload=reload)


_COPY = "    push.target.copy_(push.source)\n"
_PAUSE = "    pause(0.0)  # anything may run between data and signal; tests make it do so\n"
_SIGNAL = "    push.signal.copy_(push.epoch)\n"
_POLL = 'seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")\n'
_CLAIM = 'tl.int64), sem="relaxed", scope="gpu")'
_FIRST_POLL = f"begin = clock(spins, TIMED)\n    {_POLL}"
_NEXT_POLL = f"while waiting:\n        {_POLL}"


def host_faults() -> dict[str, Fault]:
    """Faults of the host code, for either operator."""
    return {
        "flag before data": Fault("copy_engine", _COPY + _PAUSE + _SIGNAL, _SIGNAL + _PAUSE + _COPY),
        "dropped signal": Fault("copy_engine", _PAUSE + _SIGNAL, _PAUSE, "deadlock"),
        "dropped data": Fault("copy_engine", _COPY + _PAUSE, _PAUSE),
        "slot reused one epoch early": Fault("workspace", "SLOTS = 2\n", "SLOTS = 1\n"),
        "slots not used in turn": Fault("workspace", "self._turn = (self._turn + 1) % SLOTS", "self._turn = 0"),
        "no epoch increment on the device": Fault("workspace", "        self.epoch.add_(1)\n", "", "wrong result|deadlock"),
        "wrong block at the peer": Fault("workspace", "[self.rank]\n        return Push", "[peer]\n        return Push"),
        "wrong signal word": Fault("workspace", "self.slot.outgoing[peer], ", "self.slot.outgoing[self.rank], ", "deadlock"),
        "operator ends before its pushes": Fault("domain", "        self.engine.join()\n", ""),
    }


def fused_faults(kernel: str) -> dict[str, Fault]:
    """Faults of the host and device code that persistent kernels use; `kernel` is the kernel's module."""
    wait = "arrived = wait_signal(signals_ptr + source, epoch, abort_ptr, record_ptr, tag, source, limit, TIMED)"
    order = "a wait acquires at system scope"
    first_relaxed, first_gpu = _FIRST_POLL.replace("acquire", "relaxed"), _FIRST_POLL.replace("sys", "gpu")
    next_relaxed, next_gpu = _NEXT_POLL.replace("acquire", "relaxed"), _NEXT_POLL.replace("sys", "gpu")
    return {
        "counters not zeroed": Fault("workspace", "        self.counters.zero_()\n", ""),
        "no wait": Fault(kernel, wait, "arrived = source == source"),
        "wait for somebody else": Fault(kernel, wait, wait.replace("_ptr + source", "_ptr + (2 * rank + WORLD - source) % WORLD")),
        "stale epoch": Fault(kernel, "epoch = tl.load(epoch_ptr)", "epoch = tl.load(epoch_ptr) - 1"),
        "every other tile skipped": Fault("kernels.signal", f"1, {_CLAIM}", f"2, {_CLAIM}", "wrong result|deadlock", (kernel,)),
        "wait does not loop": Fault("kernels.signal", "    waiting = seen < epoch\n", "    waiting = seen < seen\n",
                                    "OverlapTimeoutError", (kernel,)),
        "first poll relaxed": Fault("kernels.signal", _FIRST_POLL, first_relaxed, order, (kernel,)),
        "first poll at GPU scope": Fault("kernels.signal", _FIRST_POLL, first_gpu, order, (kernel,)),
        "next poll relaxed": Fault("kernels.signal", _NEXT_POLL, next_relaxed, order, (kernel,)),
        "next poll at GPU scope": Fault("kernels.signal", _NEXT_POLL, next_gpu, order, (kernel,)),
    }  # fmt: skip
