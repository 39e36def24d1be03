"""docs/troubleshooting.md has an entry for every error message that we raise, and none for a message that is gone.

An entry is a quotation in the first column of a table, with `...` for what varies; it may leave out the end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .raised_messages import Message, messages_of, messages_under

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
OTHERS = "## Messages of other programs"  # from here on the page quotes what is not in our Python sources
LEAST_WORDS = 3  # of a quotation, or all that the message has


def our_messages() -> list[Message]:
    return messages_under(*(ROOT / folder for folder in ("overlap_train", "integrations", "recipes")))


def rows_of(page: str) -> list[list[str]]:
    """The cells of all rows of the page's tables of our messages."""
    rows = [line.strip("| ").split(" | ") for line in page.partition(OTHERS)[0].splitlines() if line.startswith("| ")]
    return [row for row in rows if "`" in row[0]]


def entries_of(page: str) -> list[str]:
    return [entry for row in rows_of(page) for entry in re.findall(r"`([^`]+)`", row[0])]


def documents(entry: str, message: Message) -> bool:
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


def undocumented(messages: Sequence[Message], page: str) -> list[str]:
    entries = entries_of(page)
    return [f"{m.where}: {m.text}" for m in messages if not any(documents(entry, m) for entry in entries)]


def test_every_message_has_an_entry() -> None:
    missing = undocumented(our_messages(), PAGE)
    assert not missing, "not in docs/troubleshooting.md:\n" + "\n".join(missing)


def test_every_entry_quotes_a_message() -> None:
    messages = our_messages()
    stale = [entry for entry in entries_of(PAGE) if not any(documents(entry, message) for message in messages)]
    assert not stale, "quoted in docs/troubleshooting.md, but raised nowhere:\n" + "\n".join(stale)


def test_every_entry_says_what_it_means_and_what_to_do() -> None:
    for row in rows_of(PAGE):
        assert len(row) == 3 and all(cell.strip() for cell in row), row


def test_a_message_without_an_entry_is_found() -> None:
    source = """
def check(k):
    if k % 7:
        raise ValueError(f"k={k} is no multiple of seven: pad it to one")
"""
    assert undocumented(messages_of(source), PAGE) == ["source:4: k=... is no multiple of seven: pad it to one"]


def test_an_entry_that_is_taken_out_is_missed() -> None:
    row = next(line for line in PAGE.splitlines() if "first dimension must be divisible by the group's" in line)
    (missing,) = undocumented(our_messages(), PAGE.replace(row, ""))
    assert "x_shard_k has shape" in missing


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
