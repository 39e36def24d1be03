"""Call a function on a module as soon as it has been imported, before anybody takes names out of it by value.

A user's script decides when Megatron is imported, and from which folder (it may change sys.path first). So the script
hooks wait for Megatron's modules instead of importing them, and see each one between the end of its own code and the
first `from module import name` of somebody else.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


@contextmanager
def after_import(actions: Mapping[str, Action]) -> Iterator[None]:
    """Inside the block, `actions[name](module)` is called once for each module of that name; at once if it is there.

    What an action raises, the import raises.
    """
    waiting = dict(actions)
    for name in [name for name in waiting if name in sys.modules]:
        waiting.pop(name)(sys.modules[name])
    finder = _Finder(waiting)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds nothing itself: it asks the other finders, and puts a loader with the action around theirs."""

    def __init__(self, waiting: dict[str, Action]) -> None:
        self._waiting = waiting

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._waiting:
            return None
        action = self._waiting.pop(name)  # so that the question below goes past this finder
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._waiting[name] = action
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, lambda module: self._waiting.pop(name)(module))
        return spec


class _Loader(Loader):
    """The module's own loader, and then the action."""

    def __init__(self, loader: Loader, action: Action) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loader  # nobody sees this one: inspect and pickle ask for the loader
        self._loader.exec_module(module)
        self._action(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
