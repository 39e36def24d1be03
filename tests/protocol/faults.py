"""Faults to plant in the real source. Each names the text that it changes: one that no longer fits fails loudly."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tests.protocol.mutation import planted

# Imported for the first time under a planted fault, a kernel would keep the fault for all tests that come after.
for _kernel in ("all_gather_gemm", "all_to_all_gemm", "gemm_reduce_scatter", "low_latency"):
    importlib.import_module(f"overlap_train.kernels.{_kernel}")


# What runs their kernels, engines, and what is made of them, in that order.
ENGINES = (
    "ops.launch",
    *(f"operators.{name}" for name in ("all_gather_gemm", "gemm_reduce_scatter", "all_to_all_gemm", "gemm_all_to_all")),
    *(
        f"operators.{name}"
        for name in ("pulled_all_to_all", "node_processes", "crossings", "node_streams", "node_exchanges", "start")
    ),
)


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
        engines = ENGINES[ENGINES.index(self.module) + 1 :] if self.module in ENGINES else ()
        reload = tuple(f"overlap_train.{name}" for name in (*engines, *self.reload))
        return planted(f"overlap_train.{self.module}", self.old, self.new, reload=reload)


def in_slot(old: str, new: str, report: str = "wrong result") -> Fault:
    """A fault of slot.py, which workspace.py imports."""
    return Fault("group.slots", old, new, report, _IMPORTERS)


_IMPORTERS = ("group.workspace",)  # of slot.py and slot_use.py
SLOT_REUSED_EARLY = Fault("group.workspace", "self._sent_after]", "self._sent_after + 1]", reload=_IMPORTERS)
_COPY = "push.target.copy_(push.source)\n"
_SIGNAL = "push.signal.copy_(push.epoch)\n"
_WORD = "word = signal_word(source, chunk)"
_SIGNAL_OF_LEG = "signal = self.slot.outgoing[leg.target][leg.chunk : leg.chunk + 1]"
_NEXT_WORD = "word = next_word(int(call.slot.epoch), call.tag)"
_FILL = "call.slot.epoch.fill_(word)"
_RESET = "call.reset_counters()"
_CLAIM = 'tl.cast(1, tl.int64), sem="relaxed", scope="gpu")'
_POLL = 'seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")\n'
_FIRST_POLL = f"signal_ptr = signals_ptr + word\n    {_POLL}"
_NEXT_POLL = f"while waiting:\n        {_POLL}"
_EXPECTED = "expected = next_word(tl.load(epoch_ptr), tag) if DIRECT else tl.load(epoch_ptr)"
_STALE = "expected = (next_word(tl.load(epoch_ptr), tag) if DIRECT else tl.load(epoch_ptr)) - (1 << 32)"
_WAITING = "    waiting = has_arrived(seen, expected) == 0\n"
_NEXT_EPOCH = 'sent by copies."""\n    word = next_word(tl.load(epoch_ptr), tag)'
_LEFT = 'tl.cast(1, tl.int64), sem="acq_rel", scope="gpu") + 1'
_COUNTED = '        tl.store(epoch_ptr, word)\n\n\n@triton.jit(do_not_specialize=["tag", "count"])\ndef next_epoch'
_ZEROED = "tl.store(left_ptr + counter, tl.cast(0, tl.int64))"
_SIGNAL_AT_PEER = 'tl.atomic_xchg(signal_ptr, word, sem="release", scope="sys")'
_COUNT = 'tl.cast(amount, tl.int64), sem="acq_rel", scope="sys") + amount'
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


def host_faults(device_waits: bool = False) -> dict[str, Fault]:
    """Faults of the host code, for either operator and any method. device_waits: a kernel advances the epoch."""
    epoch = {
        "no epoch increment": Fault("group.waits", _FILL, "pass", "wrong result|deadlock"),
        "epoch forgotten": Fault(
            "group.waits", "next_word(int(call.slot.epoch)", "next_word(0", "wrong result|deadlock"
        ),
    }
    if device_waits:
        no_step, forgotten = (
            f"{_NEXT_EPOCH} - (1 << 32)",
            _NEXT_EPOCH.replace("tl.load(epoch_ptr)", "0 * tl.load(epoch_ptr)"),
        )
        epoch = {
            "no epoch increment": Fault("kernels.signal", _NEXT_EPOCH, no_step, "wrong result|deadlock|Mismatch"),
            "epoch forgotten": Fault("kernels.signal", _NEXT_EPOCH, forgotten, "wrong result|deadlock"),
        }
    return epoch | {
        "flag before data": Fault("group.copy_engine", _COPY, f"{_SIGNAL}    pause(0.0)\n    {_COPY}"),
        "dropped signal": Fault("group.copy_engine", _SIGNAL, "pass\n", "deadlock"),
        "dropped data": Fault("group.copy_engine", _COPY, "pass\n"),
        "slot reused one operator early": SLOT_REUSED_EARLY,
        "always the same slot": Fault("group.workspace", "if user <= self._sent_after", "", reload=_IMPORTERS),
        "wrong block at the peer": in_slot("memory[peer])[self.rank]", "memory[peer])[peer]"),
        "wrong signal word": in_slot("outgoing[leg.target]", "outgoing[self.rank]", "deadlock"),
        "operator ends before its pushes": Fault(
            "group.domain", "domain.engine.join()  # whatever", "pass  # whatever", reload=("group.domain",)
        ),
    }


def fused_faults(kernel: str) -> dict[str, Fault]:
    """Faults of the host and device code that persistent kernels use; `kernel` is the kernel's module."""

    def in_signal(old: str, right: str, wrong: str, report: str) -> Fault:
        return Fault("kernels.signal", old, old.replace(right, wrong), report, ("kernels.arrivals", kernel))

    order = "a wait acquires at system scope"
    return {
        "counters not zeroed": Fault("group.waits", _RESET, "pass", "wrong result|deadlock"),
        "signal of another chunk": in_slot(_SIGNAL_OF_LEG, "signal = self.slot.outgoing[leg.target][:1]", "deadlock"),
        "no wait": Fault(kernel, "arrived = wait_signal(", "arrived = source == source  # "),
        "wait for somebody else": Fault(kernel, _WORD, _WORD.replace("source", "(2 * rank + WORLD - source) % WORLD")),
        "wait for the first chunk only": Fault(kernel, _WORD, _WORD.replace("chunk", "0 * chunk")),
        "stale epoch": Fault(kernel, _EXPECTED, _STALE, "wrong result|OverlapMismatchError|deadlock"),
        "wait does not loop": in_signal(_WAITING, "expected", "seen", "OverlapTimeoutError"),
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
        if fault.module != "group.copy_engine" and name not in _OF_PUSHES
    }
    return shared | {
        "count does not acquire": in_signal(_COUNT, "acq_rel", "release", "acquires and is released"),
        "count does not release": in_signal(_COUNT, "acq_rel", "acquire", "acquires and is released"),
        "counted without barrier": in_signal(_COUNT_BARRIER, "tl.debug_barrier()", "pass", "CTA bar"),
        "leaves relaxed": in_signal(_LEFT, "acq_rel", "relaxed", "leaves with"),
        "leaves without acquire": in_signal(_LEFT, "acq_rel", "release", "leaves with"),
        "epoch not counted": in_signal(_COUNTED, "tl.store(epoch_ptr, word)", "pass", "wrong result|deadlock"),
        "own counters not zeroed": in_signal(_ZEROED, _ZEROED, "pass", "wrong result|deadlock"),
        "told relaxed": in_signal(_SIGNAL_AT_PEER, "release", "relaxed", "released"),
        "told at GPU scope": in_signal(_SIGNAL_AT_PEER, "sys", "gpu", "released"),
    }
