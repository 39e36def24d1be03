"""The text to train on: read, cut into documents, and split into a training and a validation part."""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path

from gpt.errors import RecipeError

BLOCK_BYTES = 1024
VALIDATION_EVERY = 20


@dataclass(frozen=True)
class Corpus:
    """Documents of raw bytes: every twentieth block of the text is for validation, what lies between for training."""

    name: str
    train: tuple[bytes, ...]
    valid: tuple[bytes, ...]


def read_corpus(path: str) -> Corpus:
    """The corpus of the file `path`, or of the topics of Python's help() where `path` is empty.

    Raises:
        RecipeError: the file is missing, unreadable, empty, or too short to be split.
    """
    name, text = (f"--text {path}", _read(Path(path))) if path else ("pydoc_data.topics", _help_topics())
    if len(text) < VALIDATION_EVERY * BLOCK_BYTES:
        raise RecipeError(
            f"{name}: {len(text)} bytes are too short; a training and a validation part need "
            f"{VALIDATION_EVERY * BLOCK_BYTES}"
        )
    return split(name, text)


def split(name: str, text: bytes) -> Corpus:
    """Hold out blocks spread evenly over `text`, so that the validation part is like the training part."""
    blocks = cut_blocks(text)
    held_out = range(VALIDATION_EVERY // 2, len(blocks), VALIDATION_EVERY)
    starts = (0, *(i + 1 for i in held_out))
    ends = (*held_out, len(blocks))
    runs = (b"".join(blocks[start:end]) for start, end in zip(starts, ends, strict=True))
    return Corpus(name, tuple(run for run in runs if run), tuple(blocks[i] for i in held_out))


def cut_blocks(text: bytes) -> list[bytes]:
    """Pieces of at most BLOCK_BYTES, cut behind a line end where one comes in time; joined they are `text`."""
    pieces = []
    start = 0
    while start < len(text):
        end = start + BLOCK_BYTES
        newline = text.rfind(b"\n", start, end)
        cut = newline + 1 if end < len(text) and newline >= start + BLOCK_BYTES // 2 else end
        pieces.append(text[start:cut])
        start = cut
    return pieces


def _read(path: Path) -> bytes:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise RecipeError(f"--text {path} cannot be read: {error.strerror or error}") from error
    if not text.strip():
        raise RecipeError(f"--text {path} is empty; give a file with text in it")
    return text


def _help_topics() -> bytes:
    """The topics quote each other: paragraphs that occurred before are left out, lest validation repeat training."""
    paragraphs = "\n\n".join(pydoc_data.topics.topics.values()).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()
