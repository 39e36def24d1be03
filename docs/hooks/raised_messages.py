"""Every error message that the project's sources can raise, read from their syntax trees.

A message is the list of its literal pieces; what stands between two pieces is only known when it is raised. Collected are
the texts of exceptions and warnings, and what functions say about a problem: results of those that return `str | None`, yields
of those that return `Iterator[str]`, rules of settings, and texts that are assigned to `error` or `problem`.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

Pieces = tuple[str, ...]
HOLE: Pieces = ("", "")  # nothing literal, with a variable part between

SILENT = {"NotImplementedError", "AttributeError"}  # for programmers only
NOT_MESSAGES = {"_data_parallel_wrapper"}  # returns the name of a class
MOST_FORMS = 16  # of one message, where its parts have several texts


@dataclass(frozen=True)
class Message:
    """kind: the exception, "warning", or "" for a rule or a reason, which a caller raises, prints or puts into a table."""

    where: str  # file:line
    kind: str
    pieces: Pieces

    @property
    def text(self) -> str:
        return " ".join("...".join(self.pieces).split())


def messages_of(source: str, where: str = "source") -> list[Message]:
    """The messages of one module, each once."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    helpers = {function.name: function for function in functions}
    found: dict[str, Message] = {}
    for function in (tree, *functions):
        assignments = _assignments(function)
        for kind, node in _texts_in(function):
            for pieces in _Reader(assignments, helpers, line=node.lineno).read(node) or ():
                message = Message(f"{where}:{node.lineno}", kind, pieces)
                if any(piece.strip(" .,:;()={}") for piece in pieces):
                    found.setdefault(message.text, message)
    return list(found.values())


def messages_under(root: Path, *folders: str) -> list[Message]:
    """Those of all Python files in some folders of a checkout."""
    files = [file for folder in folders for file in sorted((root / folder).rglob("*.py"))]
    return [m for file in files for m in messages_of(file.read_text(), file.relative_to(root).as_posix())]


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function without those of the functions inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef):
            yield child
            yield from _own_nodes(child)


def _texts_in(function: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Each text with its kind."""
    returns = ast.unparse(function.returns) if isinstance(function, ast.FunctionDef) and function.returns else ""
    says_what_is_wrong = returns == "str | None" and getattr(function, "name", "") not in NOT_MESSAGES
    for node in _own_nodes(function):
        match node:
            case ast.Call(func=func, args=[text, *_]) if kind := _kind_of(func):
                yield kind, text
            case ast.Call(func=ast.Name(id="SettingRule" | "_whole"), args=[text, *_]):  # of OverlapConfig
                yield "", text
            case ast.Return(value=ast.expr() as text) if says_what_is_wrong:
                yield "", text
            case ast.Yield(value=ast.expr() as text) if returns == "Iterator[str]":
                yield "", text
            case ast.Assign(targets=[ast.Name(id="error" | "problem")], value=text):
                yield "", text


def _kind_of(called: ast.expr) -> str:
    """Of a call that raises or warns; "" for any other."""
    name = ast.unparse(called)
    if name in ("warnings.warn", "warn_user"):
        return "warning"
    return name if name == "WrongResult" or (name.endswith("Error") and name not in SILENT) else ""


def _assignments(function: ast.AST) -> list[ast.Assign]:
    return [node for node in _own_nodes(function) if isinstance(node, ast.Assign)]


@dataclass
class _Reader:
    """Reads an expression as text: the forms that it can take, or None where it is not one."""

    assignments: list[ast.Assign]
    helpers: Mapping[str, ast.FunctionDef]
    bound: Mapping[str, list[Pieces]] = field(default_factory=dict)  # parameters of a helper
    line: int = 0  # a name stands for what was assigned to it last before this line

    def read(self, node: ast.expr) -> list[Pieces] | None:
        match node:
            case ast.Constant(value=str(text)):
                return [(text,)]
            case ast.JoinedStr(values=values):
                return _joined([self.read(value) or [HOLE] for value in values])
            case ast.FormattedValue(value=ast.Name() | ast.IfExp() as value):
                return self.read(value)
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                sides = [self.read(left), self.read(right)]
                return _joined([side or [HOLE] for side in sides]) if any(sides) else None
            case ast.IfExp(body=body, orelse=orelse):
                return [*(self.read(body) or []), *(self.read(orelse) or [])] or None
            case ast.BoolOp(values=values):
                return [form for value in values for form in self.read(value) or []] or None
            case ast.Name(id=name) if name in self.bound:
                return self.bound[name]
            case ast.Name(id=name):
                before = [a for a in self.assignments if a.lineno < self.line and ast.unparse(a.targets[0]) == name]
                last = max(before, key=lambda a: a.lineno, default=None)
                return None if last is None else replace(self, line=last.lineno).read(last.value)
            case ast.Call(func=ast.Name(id=name), args=arguments) if name in self.helpers:
                return self._read_helper(self.helpers[name], arguments)
        return None

    def _read_helper(self, helper: ast.FunctionDef, arguments: list[ast.expr]) -> list[Pieces] | None:
        """The text that a function of one statement makes of its arguments."""
        if not isinstance(helper.body[-1], ast.Return) or len(helper.body) > 1 or helper.body[-1].value is None:
            return None
        names = [argument.arg for argument in helper.args.args]
        bound = {name: self.read(argument) or [HOLE] for name, argument in zip(names, arguments, strict=False)}
        return _Reader([], {}, bound).read(helper.body[-1].value)


def _joined(parts: list[list[Pieces]]) -> list[Pieces]:
    return [_concatenated(some) for some in itertools.islice(itertools.product(*parts), MOST_FORMS)]


def _concatenated(parts: tuple[Pieces, ...]) -> Pieces:
    """("a", "") + ("b", "c") -> ("a", "b", "c"): neighbouring literals become one piece."""
    pieces = [""]
    for first, *rest in parts:
        pieces[-1] += first
        pieces += rest
    return tuple(pieces)
