"""Routes Triton's interpreter through a scheduler: launches become actors, memory accesses become switch points.

Triton 3.6 and 3.9 keep the interpreter's state in module globals (program id and grid in `interpreter_builder`, patched
functions in `triton.language`). `InterpreterHooks` patches the language once for a whole schedule, sets the program id
at each switch, and wraps the `InterpreterBuilder` methods through which all global memory goes.

The interpreter is sequentially consistent, so memory order cannot be seen by running. Its rules are checked instead:

    a poll (`atomic_add(p, 0)`) acquires at system scope
    an atomic write of a word that somebody polls releases at system scope
    before that write comes a CTA barrier, if the CTA has stored a block since the last one
    the same barrier comes before a count of stored tiles
    a CTA that signals for all who counted has itself counted with acquire and release

Nor has it threads. All threads of a CTA share what an atomic returns, but each has its own result of a load. So a CTA reads a
signal, or what is claimed, by atomics; the low-latency kernels reduce over what their threads have loaded.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

if TYPE_CHECKING:
    from tests.protocol.actors import Actor
    from tests.protocol.interleaving import Scheduler

_SEMANTIC = interpreter._ir.MEM_SEMANTIC
_SCOPE = interpreter._ir.MEM_SYNC_SCOPE
_ACQUIRING = (_SEMANTIC.ACQUIRE, _SEMANTIC.ACQUIRE_RELEASE)
_RELEASING = (_SEMANTIC.RELEASE, _SEMANTIC.ACQUIRE_RELEASE)
_ADD = interpreter._ir.ATOMIC_OP.ADD
_EXCHANGE = interpreter._ir.ATOMIC_OP.XCHG
_WORD_TYPES = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_int32, 8: ctypes.c_int64}


def read_word(address: int, size: int) -> int:
    """The word of `size` bytes at `address` (signed where the protocol's words are)."""
    return _WORD_TYPES[size].from_address(address).value


@dataclass(frozen=True)
class MemoryAccess:
    """One global memory access of one CTA: of a single word or of a block (then `address` is its first element's).

    polled: addresses of the words of a volatile block, which somebody reads to wait for something.
    """

    kind: str  # load | store | poll | atomic
    address: int
    size: int  # bytes of one element
    is_word: bool
    polled: tuple[int, ...] = ()

    @property
    def is_poll(self) -> bool:
        """An atomic read, which nobody writes except to wait for something."""
        return self.kind == "poll"

    @property
    def reads_only(self) -> bool:
        """True when memory is the same afterwards."""
        return self.kind in ("load", "poll")

    def __str__(self) -> str:
        return self.kind if self.is_word else f"{self.kind} block"


class InterpreterHooks:
    """Context manager: inside it, kernels launched by actors run under `scheduler`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._undo = ExitStack()
        self._builder = interpreter.interpreter_builder
        self.patches: list[AbstractContextManager[object]] = []

    def __enter__(self) -> InterpreterHooks:
        language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
        self._undo.callback(interpreter._patch_lang(language).restore)
        self._undo.enter_context(warnings.catch_warnings())  # Triton 3.6 turns arrays of one element into scalars
        warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning)
        nothing = SimpleNamespace(restore=lambda: None)
        self._patch(interpreter, "_patch_lang", lambda fn: nothing)
        for patch in self.patches:
            self._undo.enter_context(patch)
        # GPUs do not check for overflow either, and the checks take a tenth of the time.
        self._patch(self._builder, "options", replace(self._builder.options, sanitize_overflow=False))
        self._patch(interpreter.GridExecutor, "__call__", self._launcher())
        for method, access_of in _ACCESSES.items():
            self._patch(interpreter.InterpreterBuilder, method, self._switching(method, access_of))
        self._patch(interpreter.InterpreterBuilder, "create_barrier", self._barrier())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._undo.close()

    def set_program(self, ids: tuple[int, ...], grid: tuple[int, ...]) -> None:
        """Make `tl.program_id` and `tl.num_programs` answer for the CTA that runs next."""
        self._builder.grid_dim, self._builder.grid_idx = grid, ids

    def _patch(self, owner: object, name: str, value: object) -> None:
        self._undo.enter_context(mock.patch.object(owner, name, value))

    def _launcher(self) -> Callable[..., None]:
        plain, scheduler = interpreter.GridExecutor.__call__, self._scheduler

        def launch(executor: interpreter.GridExecutor, *args: object, **kwargs: object) -> None:
            if scheduler.running_actor() is None:
                return plain(executor, *args, **kwargs)
            if executor.fn.__name__ == scheduler.left_out:
                return None
            bound, grid = _bind(executor, args, kwargs)
            ids = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
            bodies = [(i, lambda: executor.fn(**_to_interpreter(executor, bound))) for i in ids]
            run = partial(scheduler.launch, executor.fn.__name__, bodies, grid)
            return None if scheduler.enqueue_launch(run) else run()

        return launch

    def _switching(self, method: str, access_of: Callable[..., MemoryAccess]) -> Callable[..., object]:
        plain, scheduler = getattr(interpreter.InterpreterBuilder, method), self._scheduler

        def switching(builder: object, *args, **kwargs) -> object:
            actor = scheduler.running_actor()
            if actor is None:
                return plain(builder, *args, **kwargs)
            access, changed = access_of(*args), None
            if scheduler.fault is not None and access.kind != "load":
                args, changed = scheduler.fault(scheduler.name_of(access.address), access, args) or (args, None)
                access = access_of(*args)
            if method == "create_atomic_rmw":
                self._check_order(actor, access, args[0], semantic=args[4], scope=args[5])
            if method == "create_masked_load" and args[-1] and access.is_word:
                self._check_threads(actor, access)
            if access.kind == "store" and access.size == 8 and not access.is_word:
                self._store_half(actor, access, plain, builder, args)
            if method == "create_masked_load" and args[-1] and scheduler.name_of(access.address).startswith("signals"):
                scheduler.signals.add(access.address)  # a volatile load waits for it, too
            scheduler.before_access(actor, access)
            actor.stored_since_barrier |= access.kind == "store" and not access.is_word  # one thread stores a word
            result = plain(builder, *args, **kwargs)
            scheduler.after_access(actor, access)
            return result if changed is None else changed(result)

        return switching

    def _check_threads(self, actor: Actor, access: MemoryAccess) -> None:
        """The docstring's last rule."""
        name = self._scheduler.name_of(access.address)
        reduces = actor.name.startswith("low_latency")
        if (name.startswith("signals") or ".claimed" in name) and not reduces:
            raise self._scheduler.fail(actor, f"loads {name}, of which threads may see different words")

    def _store_half(self, actor: Actor, access: MemoryAccess, plain: Callable, builder: object, args: tuple) -> None:
        """Store some words of a block before the others: each of 64 bits is whole, and they may come in any order."""
        pointers, value, mask, *rest = args
        some = self._scheduler.policy.random.randbytes(mask.data.size)  # a byte a word: one call, not a thousand
        even = np.frombuffer(some, np.uint8).reshape(mask.data.shape) % 2 == 0
        half = interpreter.TensorHandle(mask.data & even, mask.dtype)
        self._scheduler.before_access(actor, access)
        plain(builder, pointers, value, half, *rest)
        self._scheduler.after_access(actor, access)

    def _barrier(self) -> Callable[..., None]:
        def barrier(builder: object, *args: object) -> None:
            actor = self._scheduler.running_actor()
            if actor is not None and self._scheduler.left_out != "CTA barrier":
                actor.stored_since_barrier = False

        return barrier

    def _check_order(
        self, actor: Actor, access: MemoryAccess, operation: object, semantic: object, scope: object
    ) -> None:
        """The rules of the module's docstring."""
        signals, fault = self._scheduler.signals, ""
        counts = ".complete" in self._scheduler.name_of(access.address)
        signals_for_all = operation == _EXCHANGE  # a signal that is not itself a count
        actor.counted = semantic if counts else actor.counted
        if access.is_poll:
            signals.add(access.address)
            if semantic not in _ACQUIRING or scope != _SCOPE.SYSTEM:
                fault = f"polls with {semantic}, {scope}; a wait acquires at system scope"
        elif access.address in signals and (semantic not in _RELEASING or scope != _SCOPE.SYSTEM):
            fault = f"signals with {semantic}, {scope}; a signal is released at system scope"
        elif access.address in signals and signals_for_all and actor.counted not in (None, _SEMANTIC.ACQUIRE_RELEASE):
            fault = f"signals for all after a count with {actor.counted}; such a count acquires and is released"
        elif (access.address in signals or counts) and actor.stored_since_barrier:
            fault = "signals after a store without a CTA barrier between; other threads' stores are not ordered"
        elif ".left" in self._scheduler.name_of(access.address) and semantic not in (None, _SEMANTIC.ACQUIRE_RELEASE):
            fault = f"leaves with {semantic}; whoever leaves last zeroes what the others have counted"
        if fault:
            raise self._scheduler.fail(actor, fault)


_signature = functools.lru_cache(64)(inspect.signature)


def _bind(executor: interpreter.GridExecutor, args: tuple, kwargs: dict) -> tuple[dict, tuple[int, int, int]]:
    """Arguments by name and the three-dimensional grid, as `GridExecutor.__call__` finds them."""
    parameters = _signature(executor.fn)
    of_call = parameters.bind(*args, **{k: v for k, v in kwargs.items() if k in parameters.parameters})
    of_call.apply_defaults()
    bound = of_call.arguments
    grid = executor.grid(bound) if callable(executor.grid) else executor.grid
    return bound, tuple(grid) + (1,) * (3 - len(grid))


def _to_interpreter(executor: interpreter.GridExecutor, bound: dict) -> dict:
    """Fresh interpreter values for one CTA: the interpreter writes into its handles now and then."""
    return {k: v if k in executor.constexprs else interpreter._implicit_cvt(v) for k, v in bound.items()}


def _access(kind: str, pointers: object, mask: object) -> MemoryAccess:
    data = np.asarray(pointers.data)
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    return MemoryAccess(kind, int(data.flat[0]), size, data.size == 1 and bool(mask.data.all()))


def _load_access(pointers: object, mask: object, *rest: object) -> MemoryAccess:
    access, is_volatile = _access("load", pointers, mask), rest[-1]
    if not is_volatile or access.is_word:
        return access
    return replace(access, polled=tuple(pointers.data[mask.data].tolist()))


def _rmw_access(operation: object, pointers: object, value: object, mask: object, *rest: object) -> MemoryAccess:
    adds_nothing = operation == _ADD and not value.data.any()
    return _access("poll" if adds_nothing else "atomic", pointers, mask)


def _cas_access(pointers: object, *rest: object) -> MemoryAccess:
    return replace(_access("atomic", pointers, pointers), is_word=True)


_ACCESSES: dict[str, Callable[..., MemoryAccess]] = {
    "create_masked_load": _load_access,
    "create_masked_store": lambda pointers, value, mask, *rest: _access("store", pointers, mask),
    "create_atomic_rmw": _rmw_access,
    "create_atomic_cas": _cas_access,
}
