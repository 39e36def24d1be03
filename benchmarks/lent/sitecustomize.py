"""Lets Triton find there what it has compiled here: put this folder on PYTHONPATH on both machines.

Triton's key of a compiled kernel also has a hash of its own shared library and of ptxas, which differ between two builds of one
version. The versions must be the same: prepare.sh says which it used.
"""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):
    import triton.compiler.compiler as compiler
    import triton.runtime.cache as cache

    def _key(src, backend, backend_options, env_vars):  # type: ignore[no-untyped-def]
        return f"{src.hash()}-{backend_options.hash()}-{sorted(env_vars.items())}"

    cache.get_cache_key = compiler.get_cache_key = _key
