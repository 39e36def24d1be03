"""A single-line fault: where it is planted, and which tests must notice it."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutation:
    """One textual change of one file.

    name: what goes wrong, unique among all. file: from the root of the repository. old: text that occurs there exactly once.
    tests: pytest's arguments (files or node ids); at least one of these tests must fail.
    gpu: the tests need GPUs and run under torchrun.
    survives: why no test can notice the fault; empty where one must.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    gpu: bool = False
    survives: str = ""

    def apply(self, source: str) -> str:
        """The file's text with the fault.

        Raises:
            ValueError: `old` does not occur exactly once, or the result is not Python.
        """
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {count} times in {self.file}; it must occur once")
        changed = source.replace(self.old, self.new)
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise ValueError(f"{self.name}: {self.file} is not Python any more: {error}") from error
        return changed

    def problem(self, root: Path = ROOT) -> str | None:
        """Why the entry no longer fits the tree, or None. Runs nothing."""
        try:
            self.apply((root / self.file).read_text())
        except (OSError, ValueError) as error:
            return str(error)
        missing = [test for test in self.tests if not _exists(test, root)]
        return f"{self.name}: no such test: {', '.join(missing)}" if missing or not self.tests else None


@dataclass(frozen=True)
class In:
    """Makes mutations of one file that have tests in common."""

    file: str
    tests: tuple[str, ...]
    gpu: bool = False

    def __call__(self, name: str, old: str, new: str, *tests: str, survives: str = "") -> Mutation:
        """tests: instead of those of the file."""
        return Mutation(name, self.file, old, new, tests or self.tests, self.gpu, survives)


def all_mutations() -> list[Mutation]:
    """Those of every module of tests/mutations/faults, in order.

    Raises:
        ValueError: two have one name.
    """
    package = importlib.import_module("tests.mutations.faults")
    modules = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    found = [fault for name in modules for fault in importlib.import_module(f"{package.__name__}.{name}").FAULTS]
    names = [mutation.name for mutation in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"two mutations have one name: {', '.join(sorted(twice))}")
    return found


def _exists(test: str, root: Path) -> bool:
    """Whether a file, or a function in it, is there; parameters in brackets are not looked at."""
    file, _, function = test.partition("::")
    if not (root / file).exists():
        return False
    return not function or function.partition("[")[0] in _functions_of(root / file)


@functools.cache
def _functions_of(file: Path) -> frozenset[str]:
    """Read once: a file is named by many entries."""
    return frozenset(node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef))
