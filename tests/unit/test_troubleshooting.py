"""docs/troubleshooting.md quotes messages that we raise, and the site's page of all messages holds every one of them.

An entry is a quotation in the first column of a table, with `...` for what varies; it may leave out the end.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from all_messages import SOURCES, page_of
from raised_messages import SILENT, Message, messages_of, messages_under

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
OTHERS = "## Messages of other programs"  # from here on the page quotes what is not in our Python sources
LEAST_WORDS = 3  # of a quotation, or all that the message has


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
    if _words(parts) < min(LEAST_WORDS, _words(message.pieces)):
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


def raised_texts(source: str) -> Iterator[str]:
    """The literal texts of a module's raise statements, found without the page's collector."""

    def is_class(name: str) -> bool:  # not a function that makes the exception of its arguments
        return name[0].isupper() and name not in SILENT

    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name), args=[text, *_])) if is_class(name):
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                for part in parts:
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield " ".join(part.value.split())


def missing(source: str, page: str) -> list[str]:
    return [text for text in raised_texts(source) if text not in page]


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


def test_the_page_of_all_messages_holds_what_is_raised(messages: list[Message]) -> None:
    page = page_of(messages)
    files = [file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")]
    assert sum(1 for file in files for _ in raised_texts(file.read_text())) > 100
    assert not [text for file in files for text in missing(file.read_text(), page)]
    assert all(message.text in page for message in messages)


def test_a_message_without_a_place_on_that_page_is_found(messages: list[Message]) -> None:
    source = """
def check(k):
    if k % 7:
        raise ValueError(f"k={k} is no multiple of seven: pad it to one")
"""
    page = page_of(messages)
    assert missing(source, page)[-1] == "is no multiple of seven: pad it to one"
    assert not missing(source, page_of(messages_of(source)))


def test_that_page_lists_messages_by_file_with_what_is_raised() -> None:
    source = """
def check(k):
    if k < 0:
        raise ValueError(f"k={k} is negative | pass 0")
    warnings.warn("k is small")

def problem(k) -> str | None:
    return "k is odd"
"""
    page = page_of(messages_of(source, "overlap_train/some.py"))
    rows = [
        "| ValueError | `k=... is negative \\| pass 0` |",
        "| warning | `k is small` |",
        "|  | `k is odd` |",
    ]
    assert page.endswith(
        "\n".join(["## overlap_train/some.py\n", "| raised as | message |", "| --- | --- |", *rows, ""])
    )


def test_all_ways_to_say_what_is_wrong_are_read() -> None:
    source = """
def _sentence(name, rule):
    return f"{name} is wrong: {rule}; set it right"

def problem_of(x) -> str | None:
    if x < 0:
        return _sentence("x", "negative")
    rule = "odd" if x % 2 else "even"
    return f"{x} is {rule}"

def problems(x) -> Iterator[str]:
    yield "one " + f"{x} more"

class C:
    def __init__(self):
        error = f"the value {self} is bad"
        warnings.warn(f"{error}, so nothing happens")

class D:
    def __init__(self):
        raise OverlapTimeoutError("it took " "too long")

def check(x):
    raise ValueError(f"{x} must {'sit' if x else 'stand'}")
"""
    assert {message.text for message in messages_of(source)} == {
        "x is wrong: negative; set it right",
        "... is odd",
        "... is even",
        "one ... more",
        "the value ... is bad",
        "the value ... is bad, so nothing happens",
        "it took too long",
        "... must sit",
        "... must stand",
    }
