"""The recipe's text: nothing is lost or shared between the two parts, samples cover them, and the yardstick counts right."""

from __future__ import annotations

import random
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core")

from gpt.data import ADD_K, BLOCK, BYTES, VALIDATION_EVERY, bigram_loss, read_samples
from gpt.program import RecipeError
from gpt.settings import Settings

ENOUGH = BLOCK * VALIDATION_EVERY


def settings(path: Path, seq_length: int) -> Settings:
    return replace(Settings(), text=str(path), seq_length=seq_length)


def both(settings: Settings) -> list[np.ndarray]:
    return [read_samples(settings, is_held_out) for is_held_out in (False, True)]


def text(samples: np.ndarray) -> bytes:
    """What samples cover: the last byte of each is the first of the next one."""
    assert (samples[:-1, -1] == samples[1:, 0]).all()
    return samples[:, :-1].tobytes() + samples[-1:, -1].tobytes()


def test_every_twentieth_block_is_held_out_and_samples_cover_the_rest(tmp_path: Path):
    content = random.Random(0).randbytes(3 * ENOUGH + 17)
    (tmp_path / "text").write_bytes(content)
    train, valid = map(text, both(settings(tmp_path / "text", 64)))
    blocks = [content[start : start + BLOCK] for start in range(0, len(content), BLOCK)]
    middle = VALIDATION_EVERY // 2
    held_out = b"".join(blocks[middle::VALIDATION_EVERY])
    del blocks[middle::VALIDATION_EVERY]
    for found, expected in ((valid, held_out), (train, b"".join(blocks))):
        assert expected.startswith(found) and len(expected) - len(found) < 64


def test_the_default_text_does_not_repeat_paragraphs():
    train, valid = map(text, both(Settings()))
    assert 300_000 < len(train) < 500_000
    inner = [valid[start : start + BLOCK].split(b"\n\n")[1:-1] for start in range(0, 10 * BLOCK, BLOCK)]
    paragraphs = [paragraph for found in inner for paragraph in found if len(paragraph) > 20]
    assert paragraphs and not [paragraph for paragraph in paragraphs if b"\n\n" + paragraph + b"\n\n" in train]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"", "training part .* has only 0 bytes"),
        (b"x" * ENOUGH, "validation part .* has only 1024 bytes; give a longer text"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, content: bytes | None, words: str):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecipeError, match=words) as refusal:
        both(settings(path, BLOCK))
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("pair", "count", "total"),
    [
        (b"ab", 2, 3),  # of "abaab": "ab" twice, "aa" once
        (b"ba", 1, 1),  # the b at the end has no byte after it
        (b"ca", 0, 0),
    ],
)
def test_the_bigrams_loss_is_of_smoothed_shares(pair: bytes, count: int, total: int):
    train, scored = (np.frombuffer(words, dtype=np.uint8)[None] for words in (b"abaab", pair))
    expected = -log((count + ADD_K) / (total + BYTES * ADD_K))
    assert bigram_loss(train, scored) == pytest.approx(expected, rel=1e-12)
