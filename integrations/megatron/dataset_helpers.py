"""Megatron's C++ dataset helpers, where Megatron came as a wheel.

`megatron.training` compiles them with `make` at every start. The megatron-core wheels bring them compiled and leave the
Makefile out, so that `make` fails there and Megatron ends the process.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path


def without_makefile(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    """Megatron's compile_helpers, for installations with and without a Makefile.

    The result raises RuntimeError where there is neither a Makefile nor a compiled module that this Python can load.
    """
    folder = Path(inspect.getfile(compile_helpers)).parent

    @functools.wraps(compile_helpers)
    def compile_or_load() -> None:
        if (folder / "Makefile").is_file():
            compile_helpers()
            return
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError as error:
            raise RuntimeError(
                f"{folder} has neither a Makefile nor a helpers_cpp that this Python can load ({error}); install megatron-core "
                "from a wheel for this Python and platform, or run from a Megatron-LM checkout"
            ) from error
        print(f"> dataset helpers: compiled ones of the megatron-core wheel in {folder}", flush=True)

    return compile_or_load
