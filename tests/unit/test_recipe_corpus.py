"""The recipe's text: nothing is lost or shared between the two parts, samples cover them, and what cannot be used is refused."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from gpt.corpus import BLOCK, VALIDATION_EVERY, read_corpus, split
from gpt.data import Samples
from gpt.program import RecipeError

ENOUGH = BLOCK * VALIDATION_EVERY


@pytest.mark.parametrize("length", [ENOUGH, 3 * ENOUGH + 17, ENOUGH // 2 + 5])
def test_every_twentieth_block_is_held_out_and_nothing_is_lost(length: int):
    text = np.frombuffer(random.Random(0).randbytes(length), dtype=np.uint8)
    corpus = split(text)
    blocks = [text[start : start + BLOCK] for start in range(0, length, BLOCK)]
    middle = VALIDATION_EVERY // 2
    held_out = [block for number, block in enumerate(blocks) if number % VALIDATION_EVERY == middle]
    others = [block for number, block in enumerate(blocks) if number % VALIDATION_EVERY != middle]
    assert corpus.valid.tobytes() == b"".join(block.tobytes() for block in held_out)
    assert corpus.train.tobytes() == b"".join(block.tobytes() for block in others)


def test_the_default_corpus_does_not_repeat_paragraphs():
    corpus = read_corpus("", 128)
    assert 300_000 < len(corpus.train) < 500_000
    training = corpus.train.tobytes()
    inner = [
        corpus.valid[start : start + BLOCK].tobytes().split(b"\n\n")[1:-1] for start in range(0, 10 * BLOCK, BLOCK)
    ]
    paragraphs = [paragraph for found in inner for paragraph in found if len(paragraph) > 20]
    assert paragraphs and not [paragraph for paragraph in paragraphs if b"\n\n" + paragraph + b"\n\n" in training]


def test_a_file_is_read_as_it_is_and_its_key_is_that_of_its_bytes(tmp_path: Path):
    content = bytes(range(256)) * 200
    (tmp_path / "bytes").write_bytes(content)
    (tmp_path / "other").write_bytes(content[:-1] + b"x")
    corpus, other = (read_corpus(str(tmp_path / name), 64) for name in ("bytes", "other"))
    assert len(corpus.train) + len(corpus.valid) == len(content)
    assert corpus.key == read_corpus(str(tmp_path / "bytes"), 128).key != other.key


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"", "training part .* has only 0 bytes"),
        (b"x" * 5 * BLOCK, "validation part .* has only 0 bytes"),
        (b"x" * ENOUGH, "validation part .* has only 1024 bytes; give a longer text"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, content: bytes | None, words: str):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecipeError, match=words) as refusal:
        read_corpus(str(path), BLOCK)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_only_the_parts_that_are_used_must_be_long_enough():
    with pytest.raises(RecipeError, match="validation part"):
        read_corpus("", 1 << 15)
    assert len(read_corpus("", 1 << 15, ("training",)).train) > 1 << 15


def test_a_folder_is_refused(tmp_path: Path):
    with pytest.raises(RecipeError, match="cannot be read"):
        read_corpus(str(tmp_path), 64)


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own():
    text = np.arange(201, dtype=np.uint8)
    samples = Samples(text, 10, seed=3)
    assert len(samples) == 20
    epochs = [[samples[20 * epoch + number] for number in range(20)] for epoch in (0, 1)]
    for epoch in epochs:
        assert sorted(int(sample[0]) for sample in epoch) == list(range(0, 200, 10))
        assert all(sample.tolist() == list(range(sample[0], sample[0] + 11)) for sample in epoch)
    starts = [[int(sample[0]) for sample in epoch] for epoch in epochs]
    assert starts[0] != starts[1] and starts[0] != sorted(starts[0])
    assert starts[0] == [int(Samples(text, 10, seed=3)[number][0]) for number in range(20)]
    assert starts[0] != [int(Samples(text, 10, seed=4)[number][0]) for number in range(20)]


def test_without_a_seed_samples_come_once_and_in_order():
    samples = Samples(np.arange(105, dtype=np.uint8), 10)
    assert [int(samples[number][0]) for number in range(len(samples))] == list(range(0, 100, 10))
    assert samples[10] is None and samples[25] is None
