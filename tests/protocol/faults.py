"""Faults to plant in the real source. Each names the text that it changes: one that no longer fits fails loudly."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from tests.protocol.mutation import planted


@dataclass(frozen=True)
class Fault:
    """One textual change of one module of the package, and what has to be reported then (a regular expression)."""

    module: str
    old: str
    new: str
    report: str = "wrong result"
    reload: tuple[str, ...] = ()

    def planted(self) -> AbstractContextManager[None]:
        """Inside, the package runs with the fault."""
        reload = tuple(f"overlap_train.{name}" for name in self.reload)
        return planted(f"overlap_train.{self.module}", self.old, self.new, reload=reload)


def in_slot(old: str, new: str, report: str = "wrong result") -> Fault:
    """A fault of slot.py, which workspace.py imports."""
    return Fault("protocol.slot", old, new, report, _IMPORTERS)


_IMPORTERS = ("protocol.workspace",)  # of slot.py and slot_use.py
SLOT_REUSED_EARLY = Fault("protocol.slot_use", "self._operator - 1]", "self._operator]", reload=_IMPORTERS)
_COPY = "push.target.copy_(push.source)\n"
_SIGNAL = "push.signal.copy_(push.epoch)\n"
_WORD = "word = signal_word(source, chunk)"
_WORDS = "self.slot.outgoing[peer].split(1)"
_KEEP = "self._increment.clone()"
_CLAIM = 'tl.cast(1, tl.int64), sem="relaxed", scope="gpu")'
_POLL = 'seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")\n'
_FIRST_POLL = f"signal_ptr = signals_ptr + word\n    {_POLL}"
_NEXT_POLL = f"while waiting:\n        {_POLL}"
_LEFT = 'tl.cast(1, tl.int64), sem="acq_rel", scope="gpu") + 1'
_COUNTED = "        tl.store(epoch_ptr, epoch)\n\n\n@triton.jit\ndef claim"
_ZEROED = "tl.store(left_ptr + word, tl.cast(0, tl.int64))"
_SIGNAL_AT_PEER = 'tl.atomic_xchg(signal_ptr, epoch, sem="release", scope="sys")'
_COUNT = 'tl.cast(1, tl.int64), sem="acq_rel", scope="sys") + 1'
_COUNT_BARRIER = "tl.debug_barrier()\n    counted"
_OF_PUSHES = (  # and of epochs that the host has counted
    "no epoch increment",
    "epoch forgotten",
    "counters not zeroed",
    "operator ends before its pushes",
    "wrong block at the peer",
    "wrong signal word",
    "signal of another chunk",
)


def host_faults() -> dict[str, Fault]:
    """Faults of the host code, for either operator and any method."""
    return {
        "flag before data": Fault("protocol.copy_engine", _COPY, f"{_SIGNAL}    pause(0.0)\n    {_COPY}"),
        "dropped signal": Fault("protocol.copy_engine", _SIGNAL, "pass\n", "deadlock"),
        "dropped data": Fault("protocol.copy_engine", _COPY, "pass\n"),
        "slot reused one operator early": SLOT_REUSED_EARLY,
        "always the same slot": Fault("protocol.slot_use", "if user < self._operator - 1", "", reload=_IMPORTERS),
        "no epoch increment": in_slot("_increment[0] = 1", "_increment[0] = 0", "wrong result|deadlock"),
        "epoch forgotten": in_slot(_KEEP, "torch.zeros_like(self._increment)", "wrong result|deadlock"),
        "wrong block at the peer": in_slot("memory[peer])[self.rank]", "memory[peer])[peer]"),
        "wrong signal word": in_slot("outgoing[peer]", "outgoing[self.rank]", "deadlock"),
        "operator ends before its pushes": Fault("domain", "domain.engine.join()", "pass"),
    }


def fused_faults(kernel: str) -> dict[str, Fault]:
    """Faults of the host and device code that persistent kernels use; `kernel` is the kernel's module."""

    def in_signal(old: str, right: str, wrong: str, report: str) -> Fault:
        return Fault("kernels.signal", old, old.replace(right, wrong), report, (kernel,))

    order = "a wait acquires at system scope"
    return {
        "counters not zeroed": in_slot(_KEEP, "torch.ones_like(self._increment)"),
        "signal of another chunk": in_slot(_WORDS, "[self.slot.outgoing[peer][:1]] * 2", "deadlock"),
        "no wait": Fault(kernel, "arrived = wait_signal(", "arrived = source == source  # "),
        "wait for somebody else": Fault(kernel, _WORD, _WORD.replace("source", "(2 * rank + WORLD - source) % WORLD")),
        "wait for the first chunk only": Fault(kernel, _WORD, _WORD.replace("chunk", "0 * chunk")),
        "stale epoch": Fault(kernel, "epoch = tl.load(epoch_ptr)", "epoch = tl.load(epoch_ptr) - 1"),
        "wait does not loop": in_signal("    waiting = seen < epoch\n", "epoch", "seen", "OverlapTimeoutError"),
        "every other tile skipped": in_signal(_CLAIM, "cast(1", "cast(2", "wrong result|deadlock"),
        "first poll relaxed": in_signal(_FIRST_POLL, "acquire", "relaxed", order),
        "first poll at GPU scope": in_signal(_FIRST_POLL, "sys", "gpu", order),
        "next poll relaxed": in_signal(_NEXT_POLL, "acquire", "relaxed", order),
        "next poll at GPU scope": in_signal(_NEXT_POLL, "sys", "gpu", order),
    }


def storing_faults(kernel: str, *between: str) -> dict[str, Fault]:
    """Those of a persistent kernel that stores at the peers and pushes nothing.

    between: modules that import kernels.signal for it.
    """

    def in_signal(old: str, right: str, wrong: str, report: str) -> Fault:
        return Fault("kernels.signal", old, old.replace(right, wrong), report, (*between, kernel))

    shared = {
        name: fault
        for name, fault in (host_faults() | fused_faults(kernel)).items()
        if fault.module != "protocol.copy_engine" and name not in _OF_PUSHES
    }
    return shared | {
        "count does not acquire": in_signal(_COUNT, "acq_rel", "release", "acquires and is released"),
        "count does not release": in_signal(_COUNT, "acq_rel", "acquire", "acquires and is released"),
        "counted without barrier": in_signal(_COUNT_BARRIER, "tl.debug_barrier()", "pass", "CTA bar"),
        "leaves relaxed": in_signal(_LEFT, "acq_rel", "relaxed", "leaves with"),
        "leaves without acquire": in_signal(_LEFT, "acq_rel", "release", "leaves with"),
        "epoch not counted": in_signal(_COUNTED, "tl.store(epoch_ptr, epoch)", "pass", "wrong result"),
        "own counters not zeroed": in_signal(_ZEROED, _ZEROED, "pass", "wrong result|deadlock"),
        "told relaxed": in_signal(_SIGNAL_AT_PEER, "release", "relaxed", "released"),
        "told at GPU scope": in_signal(_SIGNAL_AT_PEER, "sys", "gpu", "released"),
    }
