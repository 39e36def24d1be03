"""A hook of MkDocs: the page all-messages.md has every text of the sources by file, so nobody writes such a list by hand.

A text is a literal of three words or more that is no docstring and no help of a flag; `...` stands for what varies.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCES = ("overlap_train", "integrations", "recipes")
HELP = {"option", "_setting", "_count", "_positive", "add_argument", "Parser"}
HEAD = """# All messages

Every error, warning, reason and report that the sources hold, by file; `...` stands for what varies. What to check first, and the
messages that users meet most: [Troubleshooting](troubleshooting.md).
"""


def on_files(files: Any, config: Any) -> Any:
    """Add the page, made from the sources of this checkout."""
    from mkdocs.structure.files import File  # here: tests read the page where MkDocs is not installed

    files.append(File.generated(config, "all-messages.md", content=page()))
    return files


def page() -> str:
    """The page's Markdown."""
    lines = [HEAD]
    for file in sorted(file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")):
        texts = [text for text in texts_in(ast.parse(file.read_text())) if len(text.split()) > 2]
        if texts:
            items = [f"- `{' '.join(text.replace('`', chr(39)).split())}`" for text in dict.fromkeys(texts)]
            lines += [f"## {file.relative_to(ROOT)}\n", *items, ""]
    return "\n".join(lines)


def texts_in(node: ast.AST) -> Iterator[str]:
    """The texts below a node."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Expr(value=ast.Constant()):  # a docstring
                continue
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in HELP:
                continue
            case ast.Constant(value=str(text)):
                yield text
            case ast.JoinedStr(values=parts):
                yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in parts)
                # texts in what varies
                child = ast.List([part for part in parts if isinstance(part, ast.FormattedValue)])
        yield from texts_in(child)
