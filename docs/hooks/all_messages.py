"""A hook of MkDocs: the page all-messages.md has every text of the sources by file, so nobody writes such a list by hand.

A text is a literal of three words or more that is no docstring and no help of a flag: a list of its literal pieces, between which
stands what is only known when it is used.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
SOURCES = ("overlap_train", "integrations", "recipes")
LEAST_WORDS = 3
HELP = {"option", "_setting", "add_argument", "Parser"}
HEAD = """# All messages

Every error, warning, reason and report that the sources hold, by file; `...` stands for what varies. What to check first, and the
messages that users meet most: [Troubleshooting](troubleshooting.md).
"""


class Message(NamedTuple):
    file: str
    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join("...".join(self.pieces).split())


def on_files(files: Any, config: Any) -> Any:
    """Add the page, made from the sources of this checkout."""
    from mkdocs.structure.files import File  # here: tests read the page where MkDocs is not installed

    files.append(File.generated(config, "all-messages.md", content=page_of(messages_under(ROOT, *SOURCES))))
    return files


def page_of(messages: list[Message]) -> str:
    """The page's Markdown; the messages of a file follow each other."""
    lines = [HEAD]
    for file, some in itertools.groupby(messages, lambda message: message.file):
        lines += [f"## {file}\n", *("- `" + message.text.replace("`", "'") + "`" for message in some), ""]
    return "\n".join(lines)


def messages_under(root: Path, *folders: str) -> list[Message]:
    """Those of all Python files in some folders of a checkout."""
    files = [file for folder in folders for file in sorted((root / folder).rglob("*.py"))]
    return [m for file in files for m in messages_of(file.read_text(), file.relative_to(root).as_posix())]


def messages_of(source: str, file: str = "source") -> list[Message]:
    """The messages of one module, each once."""
    texts = dict.fromkeys(_texts_in(ast.parse(source)))
    return [Message(file, text) for text in texts if len(re.findall(r"\w+", " ".join(text))) >= LEAST_WORDS]


def _texts_in(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """Texts below a node, each as long as it goes on, then those inside its variable parts."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Expr(value=ast.Constant()):  # a docstring
                continue
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in HELP:
                continue
        pieces = _pieces_of(child)
        if pieces:
            yield pieces
        inside = [part for part in ast.walk(child) if isinstance(part, ast.FormattedValue)] if pieces else [child]
        for part in inside:
            yield from _texts_in(part)


def _pieces_of(node: ast.AST) -> tuple[str, ...]:
    """("a", "b"): a text with a variable part between a and b. (): no text."""
    match node:
        case ast.Constant(value=str(text)):
            return (text,)
        case ast.JoinedStr(values=parts) if parts:
            return _joined([_pieces_of(part) or ("", "") for part in parts])
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            sides = [_pieces_of(left), _pieces_of(right)]
            return _joined([side or ("", "") for side in sides]) if any(sides) else ()
    return ()


def _joined(parts: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Neighbouring literals become one piece."""
    pieces = [""]
    for first, *rest in parts:
        pieces[-1] += first
        pieces += rest
    return tuple(pieces)
