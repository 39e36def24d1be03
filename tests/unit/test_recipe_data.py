"""The recipe's text: nothing is lost or shared between the two parts, samples cover them, and the yardstick counts right."""

from __future__ import annotations

import random
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core")

from gpt.data import ADD_K, BLOCK, BYTES, VALIDATION_EVERY, Samples, bigram_loss, read_samples
from gpt.program import RecipeError
from gpt.settings import Settings

ENOUGH = BLOCK * VALIDATION_EVERY


def settings(path: Path, seq_length: int) -> Settings:
    return replace(Settings(), text=str(path), seq_length=seq_length)


def test_every_twentieth_block_is_held_out_and_nothing_is_lost(tmp_path: Path):
    content = random.Random(0).randbytes(3 * ENOUGH + 17)
    (tmp_path / "text").write_bytes(content)
    train, valid = read_samples(settings(tmp_path / "text", 64))
    blocks = [content[start : start + BLOCK] for start in range(0, len(content), BLOCK)]
    middle = VALIDATION_EVERY // 2
    assert valid.text.tobytes() == b"".join(blocks[middle::VALIDATION_EVERY])
    del blocks[middle::VALIDATION_EVERY]
    assert train.text.tobytes() == b"".join(blocks)


def test_the_default_text_does_not_repeat_paragraphs():
    train, valid = read_samples(Settings())
    assert 300_000 < len(train.text) < 500_000
    content = train.text.tobytes()
    inner = [valid.text[start : start + BLOCK].tobytes().split(b"\n\n")[1:-1] for start in range(0, 10 * BLOCK, BLOCK)]
    paragraphs = [paragraph for found in inner for paragraph in found if len(paragraph) > 20]
    assert paragraphs and not [paragraph for paragraph in paragraphs if b"\n\n" + paragraph + b"\n\n" in content]


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
        read_samples(settings(path, BLOCK))
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own():
    samples = Samples(np.arange(201, dtype=np.uint8), 10, seed=3)
    epochs = [[samples[20 * epoch + number] for number in range(20)] for epoch in (0, 1)]
    for epoch in epochs:
        assert sorted(int(sample[0]) for sample in epoch) == list(range(0, 200, 10))
        assert all(sample.tolist() == list(range(sample[0], sample[0] + 11)) for sample in epoch)
    starts = [[int(sample[0]) for sample in epoch] for epoch in epochs]
    assert starts[0] != starts[1] and starts[0] != sorted(starts[0])
    assert starts[0] != [int(Samples(samples.text, 10, seed=4)[number][0]) for number in range(20)]


def test_without_a_seed_samples_come_once_and_in_order():
    samples = Samples(np.arange(105, dtype=np.uint8), 10)
    assert [int(samples[number][0]) for number in range(len(samples))] == list(range(0, 100, 10))
    assert samples[10] is None and samples[25] is None


@pytest.mark.parametrize(
    ("pair", "count", "total"),
    [
        (b"ab", 2, 3),  # of "abaab": "ab" twice, "aa" once
        (b"ba", 1, 1),  # the b at the end has no byte after it
        (b"ca", 0, 0),
    ],
)
def test_the_bigrams_loss_is_of_smoothed_shares(pair: bytes, count: int, total: int):
    train, scored = (np.frombuffer(words, dtype=np.uint8) for words in (b"abaab", pair))
    expected = -log((count + ADD_K) / (total + BYTES * ADD_K))
    assert bigram_loss(train, scored) == pytest.approx(expected, rel=1e-12)
