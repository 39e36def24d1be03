"""Call a function on a module as soon as it has been imported, before anybody takes names out of it by value.

A user's script decides when Megatron is imported, and from which folder: it may change sys.path first. The script hooks therefore
wait for Megatron's modules instead of importing them. They see each one between the end of its own code and the first
`from module import name` of somebody else.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


@contextmanager
def after_import(actions: Mapping[str, Action]) -> Iterator[None]:
    """Call `actions[name](module)` once for each module of that name that is imported inside the block; at once if it is there.

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
    """Finds nothing itself: it asks the other finders, and lets the action follow what their loader executes."""

    def __init__(self, waiting: dict[str, Action]) -> None:
        self._waiting = waiting

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._waiting:
            return None
        action = self._waiting.pop(name)  # the question below goes past this finder
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._waiting[name] = action
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader, name)
        return spec

    def _follow(self, loader: Any, name: str) -> None:
        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # its class's own again, for this module and for all that it imports
            loader.exec_module(module)
            self._waiting.pop(name)(module)

        loader.exec_module = exec_module
