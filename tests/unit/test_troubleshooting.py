"""docs/troubleshooting.md quotes messages that we raise.

An entry is a quotation in the first column of a table, with `...` for what varies; it may leave out the end.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
OTHERS = "## Messages of other programs"  # from here on the page quotes what is not in our Python sources
# The cells of all rows of the page's tables of our messages.
ROWS = [
    row
    for line in PAGE.partition(OTHERS)[0].splitlines()
    if line.startswith("| ") and "`" in (row := line.strip("| ").split(" | "))[0]
]


@pytest.fixture(scope="module")
def literals() -> str:
    """Every literal piece of text in the sources."""
    files = [file for folder in ("overlap_train", "integrations", "recipes") for file in (ROOT / folder).rglob("*.py")]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return "\0".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_every_entry_quotes_messages(literals: str) -> None:
    entries = [entry for row in ROWS for entry in re.findall(r"`([^`]+)`", row[0])]
    parts = [part for entry in entries for part in re.split(r"\s*\.\.\.\s*", entry) if part]
    assert len(entries) > 30
    assert not [part for part in parts if part not in literals], "quoted in docs/troubleshooting.md, but raised nowhere"


def test_every_entry_says_what_it_means_and_what_to_do() -> None:
    for row in ROWS:
        assert len(row) == 3 and all(cell.strip() for cell in row), row
