"""What Triton needs beside its wheel: a C compiler and Python's headers.

With these it builds its module for the CUDA driver when it launches its first kernel on a machine (Triton 3.6, runtime/build.py).
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from .report import Finding, ok, warn

NAME = "c compiler"
_EXPECTED = (
    "a C compiler and Python.h: Triton builds its module for the CUDA driver with them, unless its cache has one"
)


def check_toolchain(on_gpu: bool, variables: Mapping[str, str]) -> list[Finding]:
    """A compiler where Triton looks for one (CC, else gcc, else clang), and Python.h where it tells it to look."""
    if not on_gpu:
        return []
    asked = variables.get("CC")
    compiler = next(filter(None, map(shutil.which, [asked] if asked else ["gcc", "clang"])), None)
    if compiler is None:
        fix = "unset CC, or set it to a compiler on PATH" if asked else "install gcc, or set CC to a C compiler"
        return [warn(NAME, f"CC={asked}: not found" if asked else "neither gcc nor clang", _EXPECTED, fix)]
    headers = _headers()
    if not Path(headers, "Python.h").is_file():
        return [
            warn(NAME, f"no Python.h in {headers}", _EXPECTED, "install Python's headers (python3-dev, python3-devel)")
        ]
    return [ok(NAME, compiler)]


def _headers() -> str:
    scheme = sysconfig.get_default_scheme()
    return sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)  # as Triton on Debian
