"""Planted faults of the protocol, as hooks of the simulated machines: no line of the package is named here.

kernels     what a CTA does to a word that has a name (signals, counters, epochs), in Triton's interpreter
streams     what the host enqueues into simulated streams: copies, waits, events
engine      what the thread of a CPU process does with a push
hosts       torch operations of the host on named words
network     what crosses between nodes
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from triton.runtime import interpreter

from tests.protocol import simulated_ranks
from tests.protocol.interleaving import Scheduler
from tests.protocol.interpreter_hooks import MemoryAccess, read_word
from tests.protocol.simulated_gpu import Operation, SimulatedDriver
from tests.protocol.simulated_nodes import SimulatedExchange, SimulatedNccl, SimulatedNvshmem

EPOCH = 1 << 32
_ORDERS, _SCOPES = interpreter._ir.MEM_SEMANTIC, interpreter._ir.MEM_SYNC_SCOPE
Plant = Callable[[], Any]  # a context manager


# ---- kernels ------------------------------------------------------------------------------------------------------


def accesses(
    word: str, kind: str, change: Callable[[tuple], tuple], result: Callable[[int], int] | None = None
) -> Plant:
    """Change what kernels do to words whose name has `word`: their arguments, or what the access returns."""

    def fault(name: str, access: MemoryAccess, args: tuple) -> object:
        if word not in name or access.kind != kind:
            return None
        changed = None if result is None else lambda handle: _handle(handle, [result(int(v)) for v in handle.data.flat])
        return change(args), changed

    return lambda: mock.patch.object(Scheduler, "fault", staticmethod(fault))


def words(change: Callable[[tuple], tuple]) -> Plant:
    """Change the words with flags that kernels store."""

    def fault(name: str, access: MemoryAccess, args: tuple) -> object:
        stores = access.kind == "store" and access.size == 8 and not access.is_word  # epochs are stored alone
        return (change(args), None) if stores else None

    return lambda: mock.patch.object(Scheduler, "fault", staticmethod(fault))


def _handle(like: Any, values: list[int]) -> Any:
    data = np.array(values, dtype=like.data.dtype).reshape(like.data.shape)
    return interpreter.TensorHandle(data, like.dtype)


def same(args: tuple) -> tuple:
    return args


def polls(result: Callable[[int], int] = lambda seen: seen, change: Callable[[tuple], tuple] = same) -> Plant:
    return accesses("signals", "poll", change, result)


def ordered(semantic: str | None = None, scope: str | None = None) -> Callable[[tuple], tuple]:
    """Another memory order, or scope, of an atomic."""

    def change(args: tuple) -> tuple:
        operation, pointers, value, mask, order, at = args
        return (
            operation, pointers, value, mask,
            order if semantic is None else getattr(_ORDERS, semantic), at if scope is None else getattr(_SCOPES, scope),
        )  # fmt: skip

    return change


def amount(factor: int) -> Callable[[tuple], tuple]:
    """Another amount that an atomic adds."""
    return lambda args: (*args[:2], _handle(args[2], [factor * int(v) for v in args[2].data.flat]), *args[3:])


def masked(args: tuple) -> tuple:
    """A store, or an atomic, that does nothing."""
    at = 2 if len(args) < 6 else 3
    mask = args[at]
    nothing = interpreter.TensorHandle(np.zeros_like(mask.data), mask.dtype)
    return (*args[:at], nothing, *args[at + 1 :])


def value(change: Callable[[int], int]) -> Callable[[tuple], tuple]:
    """Another value that an atomic exchange, or a store, writes."""

    def changed(args: tuple) -> tuple:
        at = 1 if len(args) < 6 else 2
        return (*args[:at], _handle(args[at], [change(int(v)) for v in args[at].data.flat]), *args[at + 1 :])

    return changed


def moved(words: int) -> Callable[[tuple], tuple]:
    """Another word: so many further on."""

    def changed(args: tuple) -> tuple:
        at = 0 if len(args) < 6 else 1
        pointer = args[at]
        there = interpreter.TensorHandle(pointer.data + np.uint64(8 * words), pointer.dtype)
        return (*args[:at], there, *args[at + 1 :])

    return changed


def left_out(kernel: str) -> Plant:
    return lambda: mock.patch.object(Scheduler, "left_out", kernel)


# ---- hosts --------------------------------------------------------------------------------------------------------


def host_leaves_out(operation: str, word: str) -> Plant:
    """The host's torch operations of that name on words whose name has `word` are left out."""

    def fault(func: str, name: str) -> bool:
        return operation in func and word in name

    return lambda: mock.patch.object(Scheduler, "host_fault", staticmethod(fault))


# ---- streams ------------------------------------------------------------------------------------------------------

_copy, _record, _wait_event = SimulatedDriver.copy, SimulatedDriver.record_event, SimulatedDriver.wait_event


def copies(change: Callable[[SimulatedDriver, int, int, int, int], None]) -> Plant:
    return lambda: mock.patch.object(SimulatedDriver, "copy", change)


def signals(change: Callable[[int], int | None], words: int = 0) -> Plant:
    """Signals that copies send: another word (None: none), or a signal so many words further on."""

    def copy(driver: SimulatedDriver, target: int, source: int, nbytes: int, stream: int) -> None:
        if nbytes != 8:
            return _copy(driver, target, source, nbytes, stream)

        def run() -> None:
            word = change(read_word(source, 8))
            if word is not None:
                ctypes.c_int64.from_address(target + 8 * words).value = word

        driver._gpu.streams[stream].enqueue(Operation("copy of a changed word", run))
        return None

    return copies(copy)


def data(change: Callable[[int, int, int], tuple[int, int, int] | None]) -> Plant:
    """Data that copies move: another (target, source, bytes); None: none."""

    def copy(driver: SimulatedDriver, target: int, source: int, nbytes: int, stream: int) -> None:
        changed = (target, source, nbytes) if nbytes == 8 else change(target, source, nbytes)
        if changed is not None:
            _copy(driver, *changed, stream)

    return copies(copy)


@contextmanager
def signal_before_data() -> Iterator[None]:
    held: dict[tuple[int, int], tuple[int, int, int]] = {}

    def copy(driver: SimulatedDriver, target: int, source: int, nbytes: int, stream: int) -> None:
        if nbytes != 8:
            held[id(driver), stream] = (target, source, nbytes)
            return
        _copy(driver, target, source, nbytes, stream)
        if (late := held.pop((id(driver), stream), None)) is not None:
            _copy(driver, *late, stream)

    with mock.patch.object(SimulatedDriver, "copy", copy):
        yield


def no_wait_for_tiles(least: int | None = None) -> Plant:
    plain = SimulatedDriver.wait_value

    def wait_value(driver: SimulatedDriver, stream: int, address: int, goal: int, flags: int) -> None:
        if least is not None:
            plain(driver, stream, address, least, flags)

    return lambda: mock.patch.object(SimulatedDriver, "wait_value", wait_value)


def no_wait_for_events(of_caller: bool) -> Plant:
    """Waits for events are left out: of the caller's stream (an operator ends before its pushes), or of all others."""

    def wait_event(driver: SimulatedDriver, stream: int, event: int, flags: int) -> None:
        if (stream == 0) != of_caller:
            _wait_event(driver, stream, event, flags)

    return lambda: mock.patch.object(SimulatedDriver, "wait_event", wait_event)


def events_too_early() -> Any:
    """An event is recorded behind nothing."""
    return mock.patch.object(SimulatedDriver, "record_event")


# ---- engine -------------------------------------------------------------------------------------------------------


class _SkippedTensor:
    def copy_(self, source: object) -> None:
        pass


def pushes(change: Callable[[Any, Any], Any]) -> Plant:
    """Pushes of the thread of a CPU process: another one."""
    plain = simulated_ranks.SimulatedEngine._stepwise
    return lambda: mock.patch.object(
        simulated_ranks.SimulatedEngine, "_stepwise", lambda engine, push: change(push, plain(engine, push))
    )


def without_data(push: Any, stepwise: Any) -> Any:
    return replace(stepwise, target=_SkippedTensor())


def without_signal(push: Any, stepwise: Any) -> Any:
    return replace(stepwise, signal=_SkippedTensor())


def without_waiting(push: Any, stepwise: Any) -> Any:
    return replace(stepwise, after=None)


def waiting_for_one_tile(push: Any, stepwise: Any) -> Any:
    return stepwise if push.after is None else replace(stepwise, after=(push.after[0], 1))


def with_the_last_epoch(push: Any, stepwise: Any) -> Any:
    return replace(stepwise, epoch=push.epoch - EPOCH)


def with_another_fingerprint(push: Any, stepwise: Any) -> Any:
    return replace(stepwise, epoch=push.epoch ^ 1)


def signal_first(push: Any, stepwise: Any) -> Any:
    class Target:
        def copy_(self, source: object) -> None:
            stepwise.signal.copy_(push.epoch)
            stepwise.target.copy_(source)

    return replace(stepwise, target=Target(), signal=_SkippedTensor())


def no_join() -> Any:
    """An operator ends before its pushes."""
    return mock.patch.object(simulated_ranks.SimulatedEngine, "join")


# ---- memory -------------------------------------------------------------------------------------------------------


def slots_overlap(of: int) -> Plant:
    """So many slots of the heap lie in one place: a slot is used again while a peer still reads it."""

    def plant() -> Any:
        layout = simulated_ranks.core("group.slots").Layout
        plain = layout.offset
        return mock.patch.object(layout, "offset", lambda self, slot: plain(self, 0 if slot < of else slot))

    return plant


def taken_at_once() -> Any:
    """What follows from the first call of an operator is sent in that call's slot, which a peer may still read."""
    use = simulated_ranks.core("group.workspace").SlotUse
    plain = use.receive_first

    def receive_first(self: Any, slot: int) -> None:
        plain(self, slot)
        self.free.insert(0, slot)

    return mock.patch.object(use, "receive_first", receive_first)


# ---- network ------------------------------------------------------------------------------------------------------


def nothing_is_awaited() -> Any:
    """What came over the network is passed on, and read, before it is here."""
    return mock.patch.object(SimulatedExchange, "arrive")


def exchanges(change: Callable[[list], list]) -> Plant:
    """Other pieces of NCCL's exchanges."""
    plain = SimulatedNccl.exchange
    return lambda: mock.patch.object(
        SimulatedNccl, "exchange", lambda nccl, crossing, pieces: plain(nccl, crossing, change(pieces))
    )


def puts(change: Callable[[SimulatedNvshmem, tuple], None]) -> Plant:
    """Another delivery of NVSHMEM's puts with a signal."""
    return lambda: mock.patch.object(
        SimulatedNvshmem, "putmem_signal_on_stream", lambda nvshmem, *put: change(nvshmem, put)
    )


_put = SimulatedNvshmem.putmem_signal_on_stream


def put_signal_first(nvshmem: SimulatedNvshmem, put: tuple) -> None:
    data_at, source, nbytes, signal, word, how, rank, stream = put
    nvshmem.signal_op_on_stream(signal, word, how, rank, stream)
    _put(nvshmem, data_at, source, nbytes, signal, word, how, rank, stream)


def put_without_data(nvshmem: SimulatedNvshmem, put: tuple) -> None:
    nvshmem.signal_op_on_stream(*put[3:])


def put_left_out(nvshmem: SimulatedNvshmem, put: tuple) -> None:
    pass
