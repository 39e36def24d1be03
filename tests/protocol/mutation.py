"""Imports a real source file with one planted fault.

    mutant("overlap_train.kernels.signal", old, new)       a fresh module, changed (a module or function will do, too)
    with planted("overlap_train.kernels.signal", old, new, reload=["overlap_train.kernels.all_gather_gemm"]):
        ...                                                here imports of these names give the changed module and a
                                                           fresh importer that uses it

The old text must occur exactly once, so that a mutation which no longer fits the source fails loudly instead of testing
nothing. Triton reads kernel sources from their file, so the changed source is written to a temporary file; files are
kept until the process ends, because tracebacks and the interpreter read them late.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import inspect
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

_numbers = itertools.count()
_folder = tempfile.TemporaryDirectory(prefix="overlap_train_mutants_")
atexit.register(_folder.cleanup)


def mutant(target: str | ModuleType | object, old: str, new: str) -> ModuleType:
    """A fresh module of `target`'s source with `old` replaced by `new`, under a new name.

    Raises ValueError when `old` does not occur exactly once.
    """
    module = module_of(target)
    source = Path(inspect.getsourcefile(module)).read_text()
    count = source.count(old)
    if count != 1:
        raise ValueError(f"{module.__name__}: {old!r} occurs {count} times; a mutation needs text that occurs once")
    return _load(module, source.replace(old, new))


@contextlib.contextmanager
def planted(target: str | ModuleType | object, old: str, new: str, *, reload: Sequence[str] = ()) -> Iterator[None]:
    """Inside, `mutant(target, old, new)` stands in for the module of `target`.

    reload: modules that import from it when they are loaded; fresh copies of them stand in as well, in the order given.
    Imports inside functions need no reload. Nested uses with the same name add up.
    """
    with contextlib.ExitStack() as stand_ins:
        name = target if isinstance(target, str) else module_of(target).__name__
        stand_ins.enter_context(_standing_in(name, mutant(target, old, new)))
        for name in reload:
            module = module_of(name)
            stand_ins.enter_context(_standing_in(name, _load(module, Path(inspect.getsourcefile(module)).read_text())))
        yield


def module_of(target: str | ModuleType | object) -> ModuleType:
    """The module that `target` names, is, or is defined in (a Triton kernel counts as the function it wraps)."""
    if isinstance(target, ModuleType):
        return target
    if isinstance(target, str):
        return importlib.import_module(target)
    return importlib.import_module(getattr(target, "fn", target).__module__)


def _load(module: ModuleType, source: str) -> ModuleType:
    name = f"{module.__name__}_mutant{next(_numbers)}"
    path = Path(_folder.name) / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    loaded = importlib.util.module_from_spec(spec)
    loaded.__package__ = module.__package__  # relative imports resolve as in the original
    sys.modules[name] = loaded  # dataclasses look modules up by name
    spec.loader.exec_module(loaded)
    return loaded


@contextlib.contextmanager
def _standing_in(name: str, module: ModuleType) -> Iterator[None]:
    original = sys.modules[name]
    _install(name, module)
    try:
        yield
    finally:
        _install(name, original)


def _install(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    package, _, leaf = name.rpartition(".")
    if package:
        setattr(sys.modules[package], leaf, module)
