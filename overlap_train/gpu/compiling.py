"""Compiling kernels: side by side in threads, and each by one rank of a node, while the others wait for Triton's cache.

A kernel for Hopper takes 2 to 4 s, of which Python holds its lock for half a second; MLIR, LLVM and ptxas run beside others.
Ranks need not talk: a rank locks a file of the kernel, and who comes later reads what it has left in Triton's cache.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from triton import AsyncCompileMode, knobs

_AT_ONCE = 8  # what a linear needs: two products, and small kernels
_POLL_S, _PATIENCE_S = (0.01, 0.25), 60.0  # a rank that was stopped keeps its lock: then others compile, too


class _Threads:
    """A thread for each kernel, of which a few are at work. Of a pool a process that ends would wait for all that is queued."""

    def __init__(self) -> None:
        self._room = threading.Semaphore(_AT_ONCE)

    def submit(self, compile_fn: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            with self._room:
                try:
                    future.set_result(compile_fn())
                except BaseException as error:
                    future.set_exception(error)

        # Never a daemon, as it would be by a daemon's call: that ends inside of the compiler, and aborts the process.
        threading.Thread(target=work, name="overlap_train-compile", daemon=False).start()
        return future


class _OncePerNode(AsyncCompileMode):  # type: ignore[misc]
    """Triton's scope in which kernels are compiled by an executor. They are still being compiled when it ends."""

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        return super().submit(key, partial(_compile_once, key, compile_fn), finalize_fn)

    def __exit__(self, *raised: object) -> None:
        self.raw_futures.clear()  # it would wait for them
        super().__exit__(*raised)


@functools.cache
def _mode() -> _OncePerNode:
    return _OncePerNode(_Threads())


def start(kernel: Any, grid: tuple[int], arguments: dict[str, Any], constants: dict[str, Any]) -> Any:
    """Start to compile `kernel` for these arguments, unless this process has. Returns its binary, or Triton's future of it."""
    settle_key(kernel)
    with _mode():
        return kernel.warmup(grid=grid, **arguments, **constants)


def compiled(kernel: Any, grid: tuple[int], arguments: dict[str, Any], constants: dict[str, Any]) -> Any:
    """The binary of `kernel` for these arguments: started before, from Triton's cache, or compiled now. It is not launched."""
    try:
        binary = start(kernel, grid, arguments, constants)
        return binary.result() if hasattr(binary, "result") else binary
    except (OSError, RuntimeError, CancelledError):  # a full disk, no more threads, the end of the process: it may pass
        return kernel.warmup(grid=grid, **arguments, **constants)


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
    """What compile_fn returns, which looks into Triton's cache before it compiles; alone among all processes of this node with
    this cache. Where they cannot lock a file they compile at once, and each stores the same. CancelledError: the process ends."""
    with ExitStack() as stack:
        with suppress(OSError):  # no folder, no locks, another rank too late
            lock = stack.enter_context(_lock_file(key).open("w"))
            _take(lock)
            # closed here, it may still be open in a process that was forked
            stack.callback(fcntl.flock, lock, fcntl.LOCK_UN)
        if not threading.main_thread().is_alive():
            raise CancelledError
        return compile_fn()


def _lock_file(key: str) -> Path:
    """Of this user, on this node: the cache's own file system may be one of all nodes, whose locks are slow, or hang."""
    folder = Path(tempfile.gettempdir(), f"overlap_train-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is another user's")
    return folder / hashlib.sha256(f"{knobs.cache.dir} {key}".encode()).hexdigest()


def _take(lock: IO[str]) -> None:
    late, (pause, longest) = time.monotonic() + _PATIENCE_S, _POLL_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > late or not threading.main_thread().is_alive():
                raise
        time.sleep(pause)
        pause = min(2 * pause, longest)
