"""A hook of MkDocs: the page all-messages.md has every message of the sources by file, so nobody writes such a list by hand."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from raised_messages import Message, messages_under

ROOT = Path(__file__).parents[2]
SOURCES = ("overlap_train", "integrations", "recipes")
HEAD = """# All messages

Every error, warning and reason that the sources hold, by file; `...` stands for what varies. What to check first, and the
messages that users meet most: [Troubleshooting](troubleshooting.md).

Where the first column is empty, the text is a part of a message or a reason in a table.
"""


def on_files(files: Any, config: Any) -> Any:
    """Add the page, made from the sources of this checkout."""
    from mkdocs.structure.files import File  # here: tests read the page where MkDocs is not installed

    files.append(File.generated(config, "all-messages.md", content=page_of(messages_under(ROOT, *SOURCES))))
    return files


def page_of(messages: list[Message]) -> str:
    """The page's Markdown; the messages of a file follow each other."""
    lines = [HEAD]
    for file, some in itertools.groupby(messages, lambda message: message.where.rpartition(":")[0]):
        lines += [f"## {file}\n", "| raised as | message |", "| --- | --- |"]
        lines += [f"| {message.kind} | {_code(message.text)} |" for message in some]
        lines.append("")
    return "\n".join(lines)


def _code(text: str) -> str:
    """Text as code in a table's cell, where a bar would begin the next one."""
    return "`" + text.replace("|", "\\|").replace("`", "'") + "`"
