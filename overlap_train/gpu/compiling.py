"""Compiling kernels: side by side in threads, and each by one rank of a node, while the others wait for Triton's cache.

A kernel for Hopper takes 2 to 4 s, of which Python holds its lock for half a second; MLIR, LLVM and ptxas run beside others.
Ranks need not talk: a rank locks a file in the kernel's folder of Triton's cache, and who comes later reads what it has left.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import IO, Any

from triton import AsyncCompileMode
from triton.runtime.cache import get_cache_manager

_AT_ONCE = 8  # what a linear needs: two products, and small kernels
_POLL_S, _PATIENCE_S = 0.01, 60.0  # a rank that was stopped keeps its lock: then others compile, too


class _OncePerNode(AsyncCompileMode):  # type: ignore[misc]
    """Triton's scope in which kernels are compiled by an executor. They are still being compiled when it ends."""

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        return super().submit(key, partial(_compile_once, key, compile_fn), finalize_fn)

    def __exit__(self, *raised: object) -> None:
        self.raw_futures.clear()  # it would wait for them
        super().__exit__(*raised)


@functools.cache
def _mode() -> _OncePerNode:
    return _OncePerNode(ThreadPoolExecutor(_AT_ONCE, "overlap_train-compile"))


def start(kernel: Any, grid: tuple[int], arguments: dict[str, Any], constants: dict[str, Any]) -> Any:
    """Start to compile `kernel` for these arguments, unless this process has. Returns its binary, or Triton's future of it."""
    settle_key(kernel)
    with _mode():
        return kernel.warmup(grid=grid, **arguments, **constants)


def compiled(kernel: Any, grid: tuple[int], arguments: dict[str, Any], constants: dict[str, Any]) -> Any:
    """The binary of `kernel` for these arguments: started before, from Triton's cache, or compiled now. It is not launched."""
    binary = start(kernel, grid, arguments, constants)
    return binary.result() if hasattr(binary, "result") else binary


def settle_key(function: Any) -> None:
    """Have Triton work out the keys of what `function` calls, then its own. Triton keeps each.

    Triton finds a compiled kernel by a key of its text, that of the functions it calls, and the constants of these. It notes the
    constants of a called function only if that function's own key is known by then (Triton 3.6). So the key would depend on which
    kernels a process has compiled before. Later runs would not find in the cache what is there, and compile it again in 3 s a
    kernel.
    """
    if hasattr(type(function), "cache_key"):  # Triton compiles it. To look at the key itself would work it out
        for name in function.fn.__code__.co_names:
            settle_key(function.fn.__globals__.get(name))
        _ = function.cache_key  # a property, which remembers


def _compile_once(key: str, compile_fn: Callable[[], Any]) -> Any:
    """What compile_fn returns, which looks into Triton's cache before it compiles; alone among all processes with this cache.
    Where they cannot lock a file they compile at once, and each stores the same."""
    with ExitStack() as stack:
        with suppress(OSError, AttributeError):  # no folder, no locks, another rank too late; a cache that is no folder
            path = get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).lock_path
            lock = stack.enter_context(open(path, "w"))
            _take(lock)
            stack.callback(
                fcntl.flock, lock, fcntl.LOCK_UN
            )  # closed here, it may still be open in a process that was forked
        return compile_fn()


def _take(lock: IO[str]) -> None:
    late = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > late:
                raise
        time.sleep(_POLL_S)
