"""docs/troubleshooting.md quotes messages that we raise: they are on the page of all messages, which the site has.

An entry is a quotation in the first column of a table, with `...` for what varies; it may leave out the end.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from all_messages import page

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


def test_every_entry_quotes_a_message() -> None:
    entries, messages = [entry for row in ROWS for entry in re.findall(r"`([^`]+)`", row[0])], page()
    assert len(entries) > 30 and "add_options" not in messages
    for entry in entries:
        parts = [re.escape(part) for part in re.split(r"\s*\.\.\.\s*", entry) if part]
        assert re.search(".*".join(parts), messages), f"{entry}: quoted in docs/troubleshooting.md, but raised nowhere"


def test_every_entry_says_what_it_means_and_what_to_do() -> None:
    for row in ROWS:
        assert len(row) == 3 and all(cell.strip() for cell in row), row
