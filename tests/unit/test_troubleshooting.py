"""docs/troubleshooting.md quotes messages that we raise, and the site's page of all messages holds every one of them.

An entry is a quotation in the first column of a table, with `...` for what varies; it may leave out the end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from all_messages import LEAST_WORDS, SOURCES, Message, messages_of, messages_under, page_of

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
OTHERS = "## Messages of other programs"  # from here on the page quotes what is not in our Python sources


@pytest.fixture(scope="module")
def messages() -> list[Message]:
    return messages_under(ROOT, *SOURCES)


def rows_of(page: str) -> list[list[str]]:
    """The cells of all rows of the page's tables of our messages."""
    rows = [line.strip("| ").split(" | ") for line in page.partition(OTHERS)[0].splitlines() if line.startswith("| ")]
    return [row for row in rows if "`" in row[0]]


def entries_of(page: str) -> list[str]:
    return [entry for row in rows_of(page) for entry in re.findall(r"`([^`]+)`", row[0])]


def quotes(entry: str, message: Message) -> bool:
    """Whether the literal parts of an entry stand in the message in their order, each in one literal piece."""
    parts = [part for part in re.split(r"\s*\.\.\.\s*", entry) if part]
    if _words(parts) < LEAST_WORDS:
        return False
    rest = "\0".join(message.pieces)
    for part in parts:
        _, found, rest = rest.partition(part)
        if not found:
            return False
    return True


def _words(parts: Sequence[str]) -> int:
    return sum(len(re.findall(r"\w+", part)) for part in parts)


def stale(page: str, messages: Sequence[Message]) -> list[str]:
    return [entry for entry in entries_of(page) if not any(quotes(entry, message) for message in messages)]


def test_every_entry_quotes_a_message(messages: list[Message]) -> None:
    assert len(entries_of(PAGE)) > 30
    assert not stale(PAGE, messages), "quoted in docs/troubleshooting.md, but raised nowhere"


def test_every_entry_says_what_it_means_and_what_to_do() -> None:
    for row in rows_of(PAGE):
        assert len(row) == 3 and all(cell.strip() for cell in row), row


def test_an_entry_of_a_message_that_is_gone_is_found(messages: list[Message]) -> None:
    entry = next(entry for entry in entries_of(PAGE) if "first dimension must be divisible by the group's" in entry)
    left = [message for message in messages if not quotes(entry, message)]
    assert len(left) == len(messages) - 1
    assert stale(PAGE, left) == [entry]


def test_the_page_of_all_messages_has_texts_by_file_and_neither_docstrings_nor_help() -> None:
    source = """
def check(k):
    \"\"\"No text of a user.\"\"\"
    option("what this flag does")
    if k < 0:
        raise ValueError(f"k={k} is `negative`: " + "pass " f"{'nothing at all' if k else 0}")
    return "too short"
"""
    page = page_of(messages_of(source, "overlap_train/some.py"))
    assert page.partition("## ")[2] == (
        "overlap_train/some.py\n\n- `k=... is 'negative': pass ...`\n- `nothing at all`\n"
    )
    assert messages_under(ROOT, "overlap_train")[0].text in page_of(messages_under(ROOT, *SOURCES))
