"""Compiling a kernel under one key, whatever was compiled before it.

Triton finds a compiled kernel by a key of its text, that of the functions it calls, and the constants of these. It notes the
constants of a called function only if that function's own key is known by then (Triton 3.6). So the key would depend on which
kernels a process has compiled before. Later runs would not find in the cache what is there, nor what was compiled ahead
(benchmarks/probes/), and compile it again in 3 s a kernel. We ask for the keys of the called functions first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def compiled(kernel: Any, grid: tuple[int], arguments: dict[str, Any], constants: dict[str, Any]) -> Any:
    """The binary of `kernel` for these arguments, from Triton's cache or compiled. It is not launched."""
    settle_key(kernel)
    return kernel.warmup(grid=grid, **arguments, **constants)


def settle_key(function: Any) -> None:
    """Have Triton work out the keys of what `function` calls, then its own. Triton keeps each."""
    if _has_key(function):
        for called in _called(function):
            settle_key(called)
        _ = function.cache_key  # a property, which remembers


def _called(function: Any) -> Iterator[Any]:
    """The functions of ours that it calls. Triton's own count with Triton's version."""
    scope = function.fn.__globals__
    return (scope[name] for name in function.fn.__code__.co_names if _has_key(scope.get(name)))


def _has_key(value: Any) -> bool:
    """Whether Triton compiles it. The key itself is not looked at, which would work it out."""
    return hasattr(type(value), "cache_key")
