"""Functions of Megatron that the launcher replaces by themselves and a little more, with overlap or without."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from overlap_train.flags import add_flags

if TYPE_CHECKING:
    import argparse

SUPPORTED = "Megatron-LM core_v0.16 to 0.20-dev, or the megatron-core 0.19 wheel"


def replace(functions: Mapping[str, Callable[..., Any]], module: ModuleType) -> None:
    """Replace each named function of a module by `wrapper(function)`. Raises RuntimeError if the module lacks one."""
    for name, wrapper in functions.items():
        if not callable(getattr(module, name, None)):
            raise no_place(module.__name__, name)
        setattr(module, name, wrapper(getattr(module, name)))


def no_place(where: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"this Megatron's {where} has no {what}, which overlap_train hooks into; supported: {SUPPORTED}"
    )


def with_our_flags(add: Callable[..., Any]) -> Callable[..., Any]:
    """add_megatron_arguments, with our flags in the parser."""

    @functools.wraps(add)
    def add_megatron_arguments(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> argparse.ArgumentParser:
        return add_flags(add(parser, *args, **kwargs))

    return add_megatron_arguments


def calling_spec_functions(get: Callable[..., Any]) -> Callable[..., Any]:
    """_get_block_submodules, for a `--spec` that is a function: Megatron before 0.19 takes finished specs only."""

    @functools.wraps(get)
    def _get_block_submodules(config: Any, spec: Any, vp_stage: int | None = None, *rest: Any, **kwargs: Any) -> Any:
        if inspect.isfunction(spec):
            spec = spec(config, vp_stage=vp_stage) if "vp_stage" in inspect.signature(spec).parameters else spec(config)
        return get(config, spec, vp_stage, *rest, **kwargs)

    return _get_block_submodules


def without_makefile(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    """Megatron's compile_helpers, for installations with and without a Makefile.

    `megatron.training` compiles its C++ dataset helpers with `make` at every start. The megatron-core wheels bring them compiled
    and leave the Makefile out: `make` fails there, and Megatron ends the process. The result raises RuntimeError where there is
    neither a Makefile nor a compiled module that this Python can load.
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
