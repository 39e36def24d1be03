"""The text to train on: bytes as tokens, one block in twenty held out for validation; and a bigram model as the yardstick."""

from __future__ import annotations

import hashlib
import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt.program import RecipeError

BYTES = 256
BLOCK = 1024
VALIDATION_EVERY = 20
ADD_K = 0.1
PARTS = ("training", "validation")


@dataclass(frozen=True)
class Corpus:
    """Two parts of a text, uint8 [bytes] each: every twentieth block is for validation, the others are for training."""

    train: np.ndarray
    valid: np.ndarray

    @property
    def key(self) -> str:
        """Names the text in checkpoints."""
        digest = hashlib.blake2b(self.train.tobytes(), digest_size=8)
        digest.update(self.valid.tobytes())
        return digest.hexdigest()


def read_corpus(path: str, seq_length: int, used: tuple[str, ...] = PARTS) -> Corpus:
    """The corpus of the file `path`, or of the topics of Python's help() where `path` is empty. It stays in memory.

    Raises:
        RecipeError: the file cannot be read, or a part that is `used` is too short for one sample of `seq_length` bytes.
    """
    name, text = (f"--text {path}", _read(Path(path))) if path else ("pydoc_data.topics", _help_topics())
    corpus = split(np.frombuffer(text, dtype=np.uint8))
    for part, content in zip(PARTS, (corpus.train, corpus.valid), strict=True):
        if part in used and len(content) <= seq_length:
            raise RecipeError(
                f"--seq-length {seq_length}: the {part} part of {name} has only {len(content)} bytes; "
                "give a longer text or a shorter --seq-length"
            )
    return corpus


def split(text: np.ndarray) -> Corpus:
    """Hold out blocks spread evenly over `text`, so that the validation part is like the training part."""
    held_out = np.arange(len(text)) // BLOCK % VALIDATION_EVERY == VALIDATION_EVERY // 2
    return Corpus(text[~held_out], text[held_out])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecipeError(f"--text {path} cannot be read: {error.strerror or error}") from error


def _help_topics() -> bytes:
    """The topics quote each other. A paragraph is taken once, lest validation repeat training."""
    paragraphs = "\n\n".join(pydoc_data.topics.topics.values()).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()


class Bigram:
    """A byte-bigram model with add-k smoothing: p(b | a) = (count(a, b) + k) / (count(a) + 256 k). Natural logarithms."""

    def __init__(self, text: np.ndarray) -> None:
        """Count the pairs of neighbours in `text`, uint8 [bytes]."""
        pairs = text[:-1].astype(np.int64) * BYTES + text[1:]
        smoothed = np.bincount(pairs, minlength=BYTES * BYTES).reshape(BYTES, BYTES) + ADD_K
        self._log_p = np.log(smoothed) - np.log(smoothed.sum(axis=1, keepdims=True))

    def nats(self, text: np.ndarray) -> float:
        """-Σ log p(byte | byte before it) over all bytes of `text` but the first."""
        return -float(self._log_p[text[:-1], text[1:]].sum())
